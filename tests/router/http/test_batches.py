"""Files and batches over HTTP, answered by fake workers."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.router.http.batches import run, runner
from baton.router.http.batches.line import LINE_PRIORITY
from baton.router.http.batches.storage import BatchStorage
from baton.router.types.request import GenerationRequest
from tests.router.http.conftest import WAIT_S, Gateway

URL = "/v1/completions"
DAY_S = 86_400
LIFETIME: dict[str, Any] = {"expires_after[seconds]": "3600"}


@pytest.fixture
def settings(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"batch_dir": tmp_path / "batches", **getattr(request, "param", {})}


@pytest.fixture(autouse=True)
def short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "POLL_S", 0.01)
    monkeypatch.setattr(runner, "_YIELD_S", 0.01)
    monkeypatch.setattr(run, "CHECK_S", 0.01)


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"prompt": "ab", "max_tokens": 2, **body}}


def text_of(lines: Sequence[Any]) -> bytes:
    return "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines).encode()


async def uploaded(gateway: Gateway, content: bytes, **fields: Any) -> Any:
    form = {"purpose": "batch", **fields}
    return await gateway.client.post("/v1/files", files={"file": ("in.jsonl", content)}, data=form)


async def created(gateway: Gateway, lines: Sequence[Any], **fields: Any) -> Any:
    file = (await uploaded(gateway, text_of(lines))).json()
    asked = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h", **fields}
    return await gateway.post("/v1/batches", **asked)


def storage(gateway: Gateway) -> BatchStorage:
    assert gateway.process.batches is not None
    return gateway.process.batches.storage


async def until(gateway: Gateway, batch_id: str, condition: Callable[[Any], bool]) -> Any:
    async with asyncio.timeout(WAIT_S):
        while not condition(batch := (await gateway.client.get(f"/v1/batches/{batch_id}")).json()):
            await asyncio.sleep(0.01)
    return batch


async def finished(gateway: Gateway, batch_id: str) -> Any:
    return await until(
        gateway, batch_id, lambda batch: batch["status"] in ("completed", "failed", "expired", "cancelled")
    )


async def lines_of(gateway: Gateway, file_id: str) -> list[Any]:
    content = await gateway.client.get(f"/v1/files/{file_id}/content")
    assert content.status_code == 200
    return [json.loads(each) for each in content.text.splitlines()]


async def test_batch_answers_each_line_and_separates_failed_requests(gateway: Gateway) -> None:
    lines = [line("a"), line("b", temperature=-1), line("c", stream=True), line("d")]
    begun = await created(gateway, lines, metadata={"job": "night"})
    assert (begun["status"], begun["object"], begun["output_file_id"]) == ("validating", "batch", None)
    batch = await finished(gateway, begun["id"])
    assert (batch["status"], batch["metadata"]) == ("completed", {"job": "night"})
    assert batch["request_counts"] == {"total": 4, "completed": 2, "failed": 2}
    assert batch["created_at"] <= batch["in_progress_at"] <= batch["completed_at"] < batch["expires_at"]
    output = {each["custom_id"]: each for each in await lines_of(gateway, batch["output_file_id"])}
    assert output.keys() == {"a", "d"}
    response = output["a"]["response"]
    assert (response["status_code"], output["a"]["error"]) == (200, None)
    assert response["body"]["object"] == "text_completion"
    assert response["body"]["usage"]["completion_tokens"] == 2
    errors = {each["custom_id"]: each["response"] for each in await lines_of(gateway, batch["error_file_id"])}
    assert {name: each["body"]["error"]["param"] for name, each in errors.items()} == {
        "b": "temperature",
        "c": "stream",
    }
    assert {each["status_code"] for each in errors.values()} == {400}


async def test_batch_of_chats_equals_the_chat_route(gateway: Gateway) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
    begun = await created(gateway, [{"custom_id": "a", "body": body}], endpoint="/v1/chat/completions")
    batch = await finished(gateway, begun["id"])
    [answer] = await lines_of(gateway, batch["output_file_id"])
    alone = await gateway.post("/v1/chat/completions", **body)
    assert answer["response"]["body"]["choices"] == alone["choices"]


@pytest.mark.parametrize(
    ("lines", "number", "words"),
    [
        ([line("a"), "{"], 2, "is not JSON"),
        ([line("a"), line("a")], 2, "used twice"),
        ([{"body": {"prompt": "a"}}], 1, "custom_id: is missing"),
        ([line("a") | {"url": "/v1/embeddings"}], 1, "url: '/v1/embeddings' is not supported"),
        (["x" * 2000], 1, "exceeds 1024 bytes"),
        ([], None, "no requests"),
    ],
)
@pytest.mark.parametrize("settings", [{"http_max_body": 1024}], indirect=True)
async def test_batch_of_an_invalid_file_fails_and_names_the_line(
    gateway: Gateway, lines: list[Any], number: int | None, words: str
) -> None:
    batch = await finished(gateway, (await created(gateway, lines))["id"])
    [error] = batch["errors"]["data"]
    assert (batch["status"], error["line"]) == ("failed", number)
    assert words in error["message"]
    assert batch["output_file_id"] is None


async def test_cancelled_batch_ends_without_answers(gateway: Gateway) -> None:
    gateway.pair.manual = True
    begun = await created(gateway, [line("a"), line("b")])
    await gateway.pair.prefill.received("prefill", 2)
    cancelling = await gateway.client.post(f"/v1/batches/{begun['id']}/cancel")
    assert cancelling.json()["status"] == "cancelling"
    batch = await finished(gateway, begun["id"])
    assert (batch["status"], batch["output_file_id"]) == ("cancelled", None)
    again = await gateway.client.post(f"/v1/batches/{begun['id']}/cancel")
    assert (again.status_code, again.json()["error"]["code"]) == (409, "batch_not_cancellable")


async def test_expired_batch_reports_requests_without_answer(gateway: Gateway) -> None:
    gateway.pair.manual = True
    begun = await created(gateway, [line("a")])
    await gateway.pair.prefill.received("prefill")
    storage(gateway).now_s = lambda: time.time() + DAY_S + 1  # noqa: TID251
    batch = await finished(gateway, begun["id"])
    assert batch["status"] == "expired"
    [error] = await lines_of(gateway, batch["error_file_id"])
    assert (error["custom_id"], error["response"], error["error"]["code"]) == ("a", None, "batch_expired")


async def test_lines_wait_while_other_requests_lack_room(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway.pair.manual = True
    begun = await created(gateway, [line("a")])
    await gateway.pair.prefill.received("prefill")
    monkeypatch.setattr(gateway.process.dispatcher, "lacks_room_before", lambda priority: priority == LINE_PRIORITY)
    await gateway.pair.prefill.received("cancel")
    gateway.pair.manual = False
    monkeypatch.setattr(gateway.process.dispatcher, "lacks_room_before", lambda priority: False)
    batch = await finished(gateway, begun["id"])
    assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


async def test_lines_have_the_lowest_priority(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[GenerationRequest] = []
    answer = gateway.process.dispatcher.answer

    def seen(request: GenerationRequest, *args: Any, **options: Any) -> Any:
        asked.append(request)
        return answer(request, *args, **options)

    monkeypatch.setattr(gateway.process.dispatcher, "answer", seen)
    await finished(gateway, (await created(gateway, [line("a", priority=-5)]))["id"])
    assert [each.priority for each in asked] == [LINE_PRIORITY]


async def test_other_callers_see_neither_files_nor_batches(gateway: Gateway) -> None:
    file = (await uploaded(gateway, text_of([line("a")]))).json()
    begun = await created(gateway, [line("a")])
    other = {"authorization": "Bearer other"}
    for path in (f"/v1/files/{file['id']}", f"/v1/files/{file['id']}/content", f"/v1/batches/{begun['id']}"):
        assert (await gateway.client.get(path, headers=other)).status_code == 404
    assert (await gateway.client.get("/v1/files", headers=other)).json()["data"] == []
    assert (await gateway.client.get("/v1/batches", headers=other)).json()["data"] == []
    asked = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
    refused = await gateway.client.post("/v1/batches", json=asked, headers=other)
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "input_file_id")
    assert (await gateway.client.post(f"/v1/batches/{begun['id']}/cancel", headers=other)).status_code == 404
    assert (await gateway.client.delete(f"/v1/files/{file['id']}", headers=other)).status_code == 404


async def test_files_are_listed_in_pages_newest_first(gateway: Gateway) -> None:
    ids = [(await uploaded(gateway, b"{}\n")).json()["id"] for _ in range(3)]
    page = (await gateway.client.get("/v1/files", params={"limit": 2})).json()
    assert ([each["id"] for each in page["data"]], page["has_more"]) == (ids[:0:-1], True)
    rest = (await gateway.client.get("/v1/files", params={"limit": 2, "after": page["last_id"]})).json()
    assert ([each["id"] for each in rest["data"]], rest["has_more"]) == (ids[:1], False)


async def test_deleted_and_expired_files_are_gone(gateway: Gateway, settings: dict[str, Any]) -> None:
    first, second = [(await uploaded(gateway, b"{}\n", **LIFETIME)).json() for _ in range(2)]
    deleted = await gateway.client.delete(f"/v1/files/{first['id']}")
    assert deleted.json() == {"id": first["id"], "object": "file", "deleted": True}
    assert (await gateway.client.get(f"/v1/files/{first['id']}")).status_code == 404
    assert second["expires_at"] - second["created_at"] == 3600
    storage(gateway).now_s = lambda: time.time() + 3601  # noqa: TID251
    assert (await gateway.client.get(f"/v1/files/{second['id']}")).status_code == 404
    storage(gateway).sweep()
    assert not list(settings["batch_dir"].rglob(f"{second['id']}*"))


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"purpose": "fine-tune"}, 400, "purpose"),
        ({"expires_after[seconds]": "5"}, 400, "expires_after[seconds]"),
        ({"title": "x"}, 400, "title"),
    ],
)
async def test_upload_names_an_invalid_field(gateway: Gateway, fields: dict[str, Any], status: int, param: str) -> None:
    refused = await uploaded(gateway, b"{}\n", **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize("settings", [{"batch_file_bytes": 1000, "batch_key_bytes": 1 << 16}], indirect=True)
async def test_uploads_over_a_limit_are_refused(gateway: Gateway) -> None:
    refused = await uploaded(gateway, b"x" * 1001)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "file_too_large")
    answers = [await uploaded(gateway, b"x") for _ in range(3)]
    assert [each.status_code for each in answers] == [200, 200, 413]
    assert answers[-1].json()["error"]["code"] == "no_room_for_file"


async def test_path_outside_the_folder_is_an_unknown_file(gateway: Gateway) -> None:
    for name in ("file-", "file-..%2f..%2fx", "file-" + "0" * 31 + "/", "batch_" + "0" * 32):
        assert (await gateway.client.get(f"/v1/files/{name}")).status_code == 404


@pytest.mark.parametrize("settings", [{"batch_dir": None}], indirect=True)
async def test_batches_are_off_without_a_folder(gateway: Gateway) -> None:
    refused = await gateway.client.get("/v1/batches")
    assert refused.status_code == 404
    assert "--batch-dir" in refused.json()["error"]["message"]
