"""The page's files and the state that it shows: to whom, and what is in it."""

import re
from pathlib import Path
from typing import Any

import pytest

from baton.process.security.api_keys import ApiKey, digest_of
from baton.router.http.page.files import FILES, FOLDER
from baton.router.types.events import Drafts
from tests.fixtures.stalled import WAITED, blamed, running, stalled
from tests.router.http.conftest import Gateway

NAMES = ("one", "two", "boss")
SECRET = "the-prompt-of-one-key"


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Keys of two users and an administrator, where the test's name speaks of keys."""
    if "key" not in request.node.name:
        return {}
    keys = [ApiKey(name, digest_of(f"baton-{name}"), is_admin=name == "boss") for name in NAMES]
    (tmp_path / "keys").write_text("".join(key.line + "\n" for key in keys))
    return {"api_keys": tmp_path / "keys"}


def shown(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer baton-{name}"}


async def state(gateway: Gateway, name: str = "boss") -> Any:
    response = await gateway.client.get("/page/state", headers=shown(name))
    assert response.status_code == 200, response.text
    return response.json()


async def test_files_need_no_key_and_all_else_does(gateway: Gateway) -> None:
    for path in FILES:
        for method in ("GET", "HEAD"):
            response = await gateway.client.request(method, path)
            assert response.status_code == 200, path
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
        for method in ("POST", "PUT", "OPTIONS"):
            assert (await gateway.client.request(method, path)).status_code == 401, path
    for path in ("/page/state", "/page/", "/page", "/page/none.js", "/page/../app.py", "/page/%2e%2e/app.py"):
        assert (await gateway.client.get(path)).status_code == 401, path


def test_every_file_is_served_and_nothing_is_loaded_from_elsewhere() -> None:
    assert sorted(FILES.values()) == sorted(file.name for file in FOLDER.iterdir())
    allowed = {"http://www.w3.org/2000/svg"}
    for file in FOLDER.iterdir():
        text = file.read_text()
        assert set(re.findall(r"""[a-z]+://[^\s"'`)]+""", text)) <= allowed, file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(", text), file.name
        assert not re.search(r"localStorage|indexedDB|\.cookie", text), file.name
        assert "sessionStorage" not in text or file.name == "chat.js", "of the tab alone, and no key"
        assert not re.search(r"""<(?!script type="module" src=)script|\son[a-z]+=|\sstyle=""", text), file.name


async def test_workers_are_shown_as_reported(gateway: Gateway) -> None:
    page = await state(gateway)

    assert (page["ready"], page["models"]) == (True, [{"name": "tiny", "chat": True, "max_context": 1024}])
    workers = {worker["name"]: worker for worker in page["cluster"]["workers"]}
    assert {worker["role"] for worker in workers.values()} == {"prefill", "decode"}
    gateway.pair.decode.report.waiting_requests = 7
    gateway.pair.decode.report.pages.total, gateway.pair.decode.report.pages.held_by_transfers = 9, 4
    load: dict[str, Any] = {}
    while load.get("queue") != 7:
        workers = {worker["name"]: worker for worker in (await state(gateway))["cluster"]["workers"]}
        load = workers["decode-0"]["load"]
    assert (load["pages"]["total"], load["pages"]["held_by_transfers"]) == (9, 4)


async def test_requests_are_shown_by_their_stages_and_without_their_texts(gateway: Gateway) -> None:
    gateway.says(SECRET)
    headers = {"x-request-id": "mine"}
    body = {"prompt": SECRET, "max_tokens": 12}
    assert (await gateway.client.post("/v1/completions", json=body, headers=headers)).status_code == 200

    page = await state(gateway)

    (request,) = page["requests"]
    assert (request["request_id"], request["status"], request["prefill"]) == ("mine", "OK", "prefill-0")
    assert (request["prompt_tokens"], request["completion_tokens"]) == (len(SECRET), 12)
    times = request["stages"]
    parts = ("router_queue", "route", "prefill_fetch", "prefill_queue", "prefill", "return")
    assert times["ttft_ms"] == pytest.approx(sum(times[f"{part}_ms"] for part in parts), abs=0.01)
    assert 0 < times["ttft_ms"] <= times["total_ms"]
    (decode,) = (worker for worker in page["cluster"]["workers"] if worker["role"] == "decode")
    assert 0 < decode["tbt"]["p50_ms"] <= decode["tbt"]["p99_ms"]
    assert SECRET not in str(page)


async def test_key_sees_its_requests_and_an_administrators_key_all(gateway: Gateway) -> None:
    for name in NAMES:
        headers = shown(name) | {"x-request-id": f"of-{name}"}
        body = {"prompt": "ab", "max_tokens": 2}
        assert (await gateway.client.post("/v1/completions", json=body, headers=headers)).status_code == 200

    one, boss = await state(gateway, "one"), await state(gateway, "boss")

    assert [request["request_id"] for request in one["requests"]] == ["of-one"]
    assert one["cluster"] is None
    assert [request["request_id"] for request in boss["requests"]] == ["of-boss", "of-two", "of-one"]
    assert len(boss["cluster"]["workers"]) == 2


async def test_failed_requests_are_listed_with_their_clients_reason(gateway: Gateway) -> None:
    too_many = await gateway.refused("/v1/completions", prompt="ab", max_tokens=5000)
    wrong_type = await gateway.refused("/v1/chat/completions", messages="no list")
    out_of_range = await gateway.refused("/v1/completions", prompt="ab", request_id="mine", top_p=7.0)
    await gateway.refused("/tokenize", prompt=7)  # no request for an answer

    requests = (await state(gateway))["requests"]

    assert [(each["status"], each["reason"]) for each in requests] == [
        ("INVALID_ARGUMENT", out_of_range["message"]),
        ("BAD_REQUEST", wrong_type["message"]),
        ("INVALID_ARGUMENT", too_many["message"]),
    ]
    assert requests[0]["request_id"] == "mine"
    assert {each["decode"] for each in requests} == {""}


async def test_request_that_its_client_cancelled_is_listed(gateway: Gateway) -> None:
    async with gateway.held("/v1/completions", prompt="abc", max_tokens=9):
        assert (await state(gateway))["requests"] == []
    while not (requests := (await state(gateway))["requests"]):
        pass

    (request,) = requests
    assert (request["status"], request["reason"]) == ("CANCELLED", "client disconnected before the first token")
    assert (request["prompt_tokens"], request["completion_tokens"], request["decode"]) == (3, 0, "decode-0")


async def test_refusal_is_shown_to_the_key_that_got_it_and_to_no_other(gateway: Gateway) -> None:
    response = await gateway.client.post("/v1/completions", json={"prompt": 1.5}, headers=shown("one"))
    assert response.status_code == 400

    assert len((await state(gateway, "one"))["requests"]) == 1
    assert (await state(gateway, "two"))["requests"] == []
    assert len((await state(gateway, "boss"))["requests"]) == 1


async def causes(gateway: Gateway, name: str, request_id: str) -> list[dict[str, Any]]:
    """Of the only stall of a request, as that key sees it."""
    shown = {each["request_id"]: each for each in (await state(gateway, name))["requests"]}
    (stall,) = shown[request_id]["stalls"]
    found: list[dict[str, Any]] = stall["causes"]
    return found


async def test_drafts_are_shown_where_there_were_any(gateway: Gateway) -> None:
    without, record = stalled("without"), stalled("with")
    record.timeline.drafts = Drafts(20, 12, 34.0)
    for each in (without, record):
        gateway.process.tracer.late_observers[-1](each)

    newest, oldest = (await state(gateway))["requests"]

    assert newest["drafts"] == {"drafted_tokens": 20, "accepted_tokens": 12, "saved_ms": 34.0}
    assert oldest["drafts"] is None


async def test_stalls_are_shown_with_their_causes_and_culprits(gateway: Gateway) -> None:
    gateway.process.tracer.late_observers[-1](stalled("mine", (blamed("long"), WAITED)))

    (request,) = (await state(gateway))["requests"]

    assert (request["stall_count"], request["tbt"]["max_ms"], len(request["trace_id"])) == (1, 100.0, 32)
    (stall,) = request["stalls"]
    assert (stall["at_ms"], stall["gap_ms"], stall["usual_ms"]) == (pytest.approx(1000.0), 100.0, 10.0)
    assert stall["causes"] == [
        {"cause": "prompt_tokens", "ms": 80.0, "culprit": "long", "by_another": False, "detail": "1000 tokens"},
        {"cause": "cpu_wait", "ms": 10.0, "culprit": "", "by_another": False, "detail": ""},
    ]


async def test_key_does_not_see_which_request_of_another_key_held_it_up(gateway: Gateway) -> None:
    observe = gateway.process.tracer.late_observers
    for record in (stalled("of-two", tenant="two"), stalled("of-one", (blamed("of-two"),), tenant="one")):
        for each in observe:
            each(record)

    (hidden,) = await causes(gateway, "one", "of-one")
    assert hidden == {"cause": "prompt_tokens", "ms": 80.0, "culprit": "", "by_another": True, "detail": ""}
    assert "of-two" not in str(await state(gateway, "one"))
    (cause,) = await causes(gateway, "boss", "of-one")
    assert (cause["culprit"], cause["detail"]) == ("of-two", "1000 tokens")


@pytest.mark.parametrize("is_running", [False, True])
async def test_key_sees_only_its_requests_as_cause_of_a_stall(gateway: Gateway, is_running: bool) -> None:
    culprit = running("long", "one") if is_running else stalled("long", tenant="one")
    if is_running:
        gateway.process.dispatcher.accounts.counts.begin(culprit)
    for record in (*([] if is_running else [culprit]), stalled("mine", (blamed("long"),), tenant="one")):
        for observe in gateway.process.tracer.late_observers:
            observe(record)

    (cause,) = await causes(gateway, "one", "mine")
    assert (cause["culprit"], cause["by_another"], cause["detail"]) == ("long", False, "1000 tokens")
