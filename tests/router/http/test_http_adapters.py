"""vLLM's routes for adapters: there when they are turned on, for administrators where there are keys."""

from pathlib import Path
from typing import Any

import pytest

from baton.process.security.api_keys import ApiKey, digest_of
from baton.protos import session_pb2
from tests.router.fake_worker import FakePair, FakeWorker
from tests.router.http.conftest import Gateway

KEYS = (ApiKey("one", digest_of("baton-one")), ApiKey("boss", digest_of("baton-boss"), is_admin=True))
turned_on = pytest.mark.parametrize("settings", [{"http_adapters": True}], indirect=True)


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    given: dict[str, Any] = getattr(request, "param", {})
    if given.get("api_keys") == "both":
        file = tmp_path / "keys"
        file.write_text("".join(f"{key.line}\n" for key in KEYS))
        return {**given, "api_keys": file}
    return given


@pytest.fixture
def pair(pair: FakePair) -> FakePair:
    """Workers that take every adapter, but of a folder `/bad`."""
    for worker in (pair.prefill, pair.decode):
        worker.info.adapter_state.SetInParent()
        answer(worker, worker.on_command)
    return pair


def answer(worker: FakeWorker, otherwise: Any) -> None:
    def on_command(command: session_pb2.ConnectRequest) -> None:
        asked, sent = command.prepare_adapter, command.adapter_list
        if command.HasField("prepare_adapter") and not asked.drop:
            refusal = "no such folder" if asked.path == "/bad" else ""
            digest = "" if refusal else "aa"
            prepared = session_pb2.AdapterPrepared(change_id=asked.change_id, digest=digest, refusal=refusal)
            worker.say(adapter_prepared=prepared)
        elif command.HasField("adapter_list"):
            state = session_pb2.AdapterState(version=sent.version, listed=sent.adapters, usable=sent.adapters)
            worker.say(adapter_state=state)
        otherwise(command)

    worker.on_command = on_command


async def models(gateway: Gateway) -> list[str]:
    listed = (await gateway.client.get("/v1/models")).json()
    return [model["id"] for model in listed["data"]]


@turned_on
async def test_adapter_is_loaded_listed_and_unloaded_as_by_vllm(gateway: Gateway) -> None:
    loaded = await gateway.client.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": "/a"})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert await models(gateway) == ["tiny", "sql"]
    unloaded = await gateway.client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert await models(gateway) == ["tiny"]
    assert (await gateway.refused("/v1/unload_lora_adapter", 404, lora_name="sql"))["code"] == "adapter_not_found"


@turned_on
async def test_error_names_the_field_or_the_worker(gateway: Gateway) -> None:
    bad = await gateway.refused("/v1/load_lora_adapter", lora_name="a b", lora_path="/a")
    assert bad["param"] == "lora_name"
    bad = await gateway.refused("/v1/load_lora_adapter", lora_name="sql", lora_path="a")
    assert bad["param"] == "lora_path"
    bad = await gateway.refused("/v1/load_lora_adapter", lora_name="sql", lora_path="/bad")
    assert "no such folder" in bad["message"]
    assert await models(gateway) == ["tiny"]


async def test_adapter_routes_need_their_flag(gateway: Gateway) -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        error = await gateway.refused(path, 404, lora_name="sql", lora_path="/a")
        assert error["code"] == "unknown_path" and "--http-adapters" in error["message"]


@pytest.mark.parametrize("settings", [{"http_adapters": True, "api_keys": "both"}], indirect=True)
async def test_adapter_routes_need_an_administrators_key(gateway: Gateway) -> None:
    body = {"lora_name": "sql", "lora_path": "/a"}
    for key, status in (("one", 403), ("boss", 200)):
        headers = {"authorization": f"Bearer baton-{key}"}
        answered = await gateway.client.post("/v1/load_lora_adapter", json=body, headers=headers)
        assert answered.status_code == status, answered.text
