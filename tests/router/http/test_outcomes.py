"""Every way in which a request can end, over gRPC and HTTP: metrics, traces and status say what its client saw."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.process.security.api_keys import ApiKey, KeyLimits, digest_of
from baton.protos import baton_pb2, session_pb2
from baton.router.dispatcher import Dispatcher
from baton.router.fleet.fleet import Inbox, WorkerLinks
from baton.router.placement.decide import Placement
from baton.router.request.events import Deadline
from tests.router.conftest import encode
from tests.router.fake_worker import FakePair
from tests.router.http.outcome_world import PROMPT, PROMPT_TOKENS, OutcomeWorld, Seen, outcome_world

LENGTH, NONFINITE = session_pb2.END_REASON_LENGTH, session_pb2.FAILURE_REASON_NONFINITE
LIMITS = {
    "requests_per_minute": KeyLimits(requests_per_minute=1),
    "tokens_per_minute": KeyLimits(tokens_per_minute=PROMPT_TOKENS + 2),
    "concurrency": KeyLimits(concurrency=1),
}


@pytest.fixture
async def world(pair: FakePair, request: pytest.FixtureRequest) -> AsyncIterator[OutcomeWorld]:
    """A test sets fields of the configuration with `indirect` parameters."""
    async with outcome_world(pair, **getattr(request, "param", {})) as world:
        yield world


def settings(**fields: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("world", [fields], indirect=True)


async def test_answered(world: OutcomeWorld) -> None:
    one = (await world.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4})).json()["usage"]
    assert (one["prompt_tokens"], one["completion_tokens"]) == (PROMPT_TOKENS, 4)
    two = [each async for each in world.generate(max_tokens=3, n=2)]
    assert two[-1].finished.usage.completion_tokens == 6
    async with world.streamed(max_tokens=5) as tokens:
        assert sum([count async for count in tokens]) == 5
    best = [each async for each in world.generate(max_tokens=2, n=1, best_of=3)]
    made = best[-1].finished.usage.completion_tokens
    assert made == 6, "all that were made"
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    said = (await world.http.post("/v1/chat/completions", json=chat)).json()["usage"]
    form = {"prompt": PROMPT, "max_tokens": 2, "structured_outputs": {"choice": ["he", "ha"]}}
    formed = (await world.http.post("/v1/completions", json=form)).json()["usage"]
    seen = [Seen("answered", "", PROMPT_TOKENS, tokens) for tokens in (4, 6, 5, made, formed["completion_tokens"])]
    await world.check(*seen, Seen("answered", "", said["prompt_tokens"], said["completion_tokens"]))


async def test_cancelled_by_its_client_in_the_middle_over_grpc(world: OutcomeWorld) -> None:
    world.pair.manual = True
    call = world.generate(max_tokens=50)
    attempt_id = await world.attempt()
    world.first(attempt_id)
    assert (await call.read()).WhichOneof("event") == "started"
    for got, text in enumerate("bcde", start=1):
        assert len((await call.read()).delta.token_ids) == 1
        await world.check(Seen("", "", PROMPT_TOKENS, got), running=1)
        world.pair.step(attempt_id, got, encode(text))
    await call.read()
    call.cancel()
    await world.check(Seen("cancelled", "client", PROMPT_TOKENS, 5))


async def test_cancelled_by_its_client_in_the_middle_over_http(world: OutcomeWorld) -> None:
    world.pair.manual = True
    saying = asyncio.create_task(world.say_of_two())
    async with world.streamed(n=2) as tokens:
        got = 0
        while got < 4:
            got += await anext(tokens)
        await world.check(Seen("", "", PROMPT_TOKENS, 4), running=1)
    await saying
    await world.check(Seen("cancelled", "client", PROMPT_TOKENS, 4))
    metrics = await world.metrics()  # of both choices:
    assert metrics["vllm:request_success_total", ("router", "abort", "tiny")] == 2
    assert metrics["vllm:time_to_first_token_seconds_count", ("router", "tiny")] == 1


@pytest.mark.parametrize("over_http", [False, True])
async def test_cancelled_while_pending(world: OutcomeWorld, over_http: bool) -> None:
    await world.full()
    if over_http:
        asking = asyncio.create_task(world.http.post("/v1/completions", json={"prompt": PROMPT}))
        await world.queued(1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    else:
        call = world.generate()
        await world.queued(1)
        await world.check(Seen(""), running=1)
        call.cancel()
    await world.check(Seen("cancelled", "client"))


async def test_superseded_by_another_stream_of_it(world: OutcomeWorld) -> None:
    world.pair.manual = True
    call = world.generate(max_tokens=3)
    attempt_id = await world.attempt()
    world.first(attempt_id)
    started = (await call.read()).started
    assert list((await call.read()).delta.token_ids) == encode("a")
    resumed = world.resume(started, "a", max_tokens=3)
    second = await world.attempt(2)
    assert await world.refused(call) is grpc.StatusCode.ABORTED
    world.pair.first_step(second, encode("b"), offset=1)
    world.pair.step(second, 1, encode("bc"), LENGTH)
    assert [each async for each in resumed][-1].finished.usage.completion_tokens == 3, "with what it had"
    # Its prompt counted when it began, and so did the token that the client had.
    await world.check(Seen("cancelled", "superseded", PROMPT_TOKENS, 1), Seen("answered", "", 0, 2))


async def test_one_of_several_prompts_fails(world: OutcomeWorld) -> None:
    world.pair.manual = True
    asking = asyncio.create_task(world.http.post("/v1/completions", json={"prompt": [PROMPT, PROMPT]}))
    first = await world.attempt()
    await world.attempt(2)
    world.first(first)
    await world.check(Seen("", "", 2 * PROMPT_TOKENS, 1), running=2)
    world.pair.decode.fail(first, NONFINITE)
    assert (await asking).status_code == 500
    await world.check(
        Seen("failed", "nonfinite_logits", PROMPT_TOKENS, 1), Seen("cancelled", "sibling_failed", PROMPT_TOKENS)
    )


async def test_failed_over(world: OutcomeWorld) -> None:
    world.pair.limits = [3]  # tokens, of the first attempt
    call = world.generate(max_tokens=5)
    attempt_id = await world.attempt()
    for _ in range(2):
        await call.read()
    world.pair.decode.fail(attempt_id, session_pb2.FAILURE_REASON_DRAINING)
    while (event := await call.read()).WhichOneof("event") != "finished":
        continue
    assert event.finished.usage.completion_tokens == 5
    await world.check(Seen("answered", "", PROMPT_TOKENS, 5))
    assert (await world.metrics())["baton:attempts_failed_total", ("draining",)] == 1


@pytest.mark.parametrize("over_http", [False, True])
async def test_failed_by_a_worker(world: OutcomeWorld, over_http: bool) -> None:
    world.pair.manual = True
    post = world.http.post("/v1/completions", json={"prompt": PROMPT}) if over_http else None
    asking: asyncio.Task[Any] = asyncio.create_task(post or world.refused(world.generate()))
    attempt_id = await world.attempt()
    world.first(attempt_id)
    world.pair.step(attempt_id, 1, encode("b"))
    await world.check(Seen("", "", PROMPT_TOKENS, 2), running=1)
    world.pair.decode.fail(attempt_id, NONFINITE)
    await asking
    await world.check(Seen("failed", "nonfinite_logits", PROMPT_TOKENS, 2))


@pytest.mark.parametrize("over_http", [False, True])
async def test_failed_by_a_fault_of_ours(world: OutcomeWorld, monkeypatch: pytest.MonkeyPatch, over_http: bool) -> None:
    async def broken(*_: object) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(Dispatcher, "_begin", broken)
    if over_http:
        await world.refused_over_http(status=500, json={"prompt": PROMPT})
    else:
        assert await world.refused(world.generate()) is grpc.StatusCode.INTERNAL
    await world.check(Seen("failed", "unexpected"))


@settings(max_active=1)
async def test_refused_for_too_many_active_ones(world: OutcomeWorld) -> None:
    world.pair.manual = True
    call = world.generate()
    await world.attempt()
    assert await world.refused(world.generate()) is grpc.StatusCode.RESOURCE_EXHAUSTED
    await world.refused_over_http(status=429, json={"prompt": PROMPT})
    call.cancel()
    await world.check(*[Seen("refused", "max_active")] * 2, Seen("cancelled", "client", PROMPT_TOKENS))


async def test_refused_while_it_drains(world: OutcomeWorld) -> None:
    world.process.dispatcher.draining = True
    assert await world.refused(world.generate()) is grpc.StatusCode.UNAVAILABLE
    await world.refused_over_http(status=503, json={"prompt": PROMPT})
    await world.check(*[Seen("refused", "draining")] * 2)


@settings(max_waiting=1)
async def test_refused_by_a_full_queue(world: OutcomeWorld) -> None:
    await world.full()
    call = world.generate()
    await world.queued(1)
    assert await world.refused(world.generate()) is grpc.StatusCode.RESOURCE_EXHAUSTED
    await world.refused_over_http(status=429, json={"prompt": PROMPT})
    call.cancel()
    await world.check(*[Seen("refused", "queue_full")] * 2, Seen("cancelled", "client"))


@settings(max_wait_s=0.05)
async def test_refused_where_no_room_came(world: OutcomeWorld) -> None:
    await world.full()
    assert await world.refused(world.generate()) is grpc.StatusCode.RESOURCE_EXHAUSTED
    await world.check(Seen("refused", "no_room"))


@settings(default_deadline_s=0.5)
async def test_deadline_passes_while_it_is_pending(world: OutcomeWorld) -> None:
    await world.full()
    for timeout_s in (0.4, 10.0):  # the client's own, which is no cancellation, and the router's
        assert await world.refused(world.generate(timeout=timeout_s)) is grpc.StatusCode.DEADLINE_EXCEEDED
    await world.refused_over_http(status=504, json={"prompt": PROMPT})
    await world.check(*[Seen("refused", "deadline_exceeded")] * 3)


async def test_deadline_passes_in_the_middle(world: OutcomeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, open_ = list[Inbox[Any]](), WorkerLinks.open

    def noted(fleet: WorkerLinks, attempt_id: int, placement: Placement, inbox: Inbox[Any]) -> None:
        opened.append(inbox)
        open_(fleet, attempt_id, placement, inbox)

    monkeypatch.setattr(WorkerLinks, "open", noted)
    world.pair.manual = True
    call = world.generate()
    world.first(await world.attempt())
    await world.check(Seen("", "", PROMPT_TOKENS, 1), running=1)
    opened[-1].put_own(Deadline())
    assert await world.refused(call) is grpc.StatusCode.DEADLINE_EXCEEDED
    await world.check(Seen("failed", "deadline_exceeded", PROMPT_TOKENS, 1))


@pytest.mark.parametrize("limit", list(LIMITS))
async def test_refused_by_the_limits_of_a_key(pair: FakePair, tmp_path: Path, limit: str) -> None:
    keys = ApiKey("limited", digest_of("baton-l"), LIMITS[limit]), ApiKey("boss", digest_of("baton-b"), is_admin=True)
    file = tmp_path / "keys"
    file.write_text("".join(key.line + "\n" for key in keys))
    async with outcome_world(pair, api_keys=file, boss="baton-b") as world:
        pair.manual = True
        call = world.generate(key="baton-l", max_tokens=3)
        attempt_id = await world.attempt()
        world.first(attempt_id)
        if limit != "concurrency":
            world.pair.step(attempt_id, 1, encode("bc"), LENGTH)
            assert [each async for each in call][-1].WhichOneof("event") == "finished"
        assert await world.refused(world.generate(key="baton-l")) is grpc.StatusCode.RESOURCE_EXHAUSTED
        headers = {"authorization": "Bearer baton-l"}
        limited = await world.http.post("/v1/completions", json={"prompt": PROMPT}, headers=headers)
        assert limited.status_code == 429
        seen = [Seen("refused", limit)] * 2
        assert await world.refused(world.generate(key="baton-x")) is grpc.StatusCode.UNAUTHENTICATED
        unknown = await world.http.post("/v1/completions", json={}, headers={"authorization": "Bearer baton-x"})
        assert unknown.status_code == 401
        seen += [Seen("refused", "invalid_api_key", traced=False)] * 2
        if limit != "concurrency":
            await world.check(*seen, Seen("answered", "", PROMPT_TOKENS, 3))
        else:
            await world.check(*seen, Seen("", "", PROMPT_TOKENS, 1), running=1)
            call.cancel()
            await world.check(*seen, Seen("cancelled", "client", PROMPT_TOKENS, 1))


@settings(http_max_body="4k")
async def test_bad_input(world: OutcomeWorld) -> None:
    bad = Seen("refused", "invalid_argument")
    assert await world.refused(world.generate("")) is grpc.StatusCode.INVALID_ARGUMENT
    assert await world.refused(world.generate(temperature=-1.0)) is grpc.StatusCode.INVALID_ARGUMENT
    assert await world.refused(world.generate("a" * 2000)) is grpc.StatusCode.INVALID_ARGUMENT
    named = world.stub.Generate(baton_pb2.GenerateRequest(text="a", model="nope"))
    assert await world.refused(named) is grpc.StatusCode.NOT_FOUND
    broken: Any = world.channel.unary_stream("/baton.v1.BatonService/Generate")
    assert await world.refused(broken(b"\xff")) is grpc.StatusCode.INVALID_ARGUMENT
    await world.refused_over_http(json={"prompt": PROMPT, "temperature": -1})
    await world.refused_over_http(json={"max_tokens": 1})
    await world.refused_over_http(content=b"{")
    await world.refused_over_http(status=413, content=b'"' + b"a" * 5000)
    await world.refused_over_http(status=404, json={"prompt": PROMPT, "model": "nope"})
    await world.refused_over_http("/v1/chat/completions", 404, json={"messages": [], "model": "nope"})
    await world.refused_over_http("/tokenize", json={})  # which is no request
    assert (await world.http.get("/v1/completions")).status_code == 405
    seen = [*[bad] * 5, *[Seen("refused", "no_such_model")] * 3]
    seen += [Seen("refused", word) for word in ("prompt_too_long", "invalid_json", "body_too_large")]
    await world.check(*seen, Seen("refused", "method_not_allowed"))


async def test_running_requests_are_cancelled_when_the_router_ends(
    pair: FakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.process.serving.server._STOP_S", 0.0)
    async with outcome_world(pair, drain_s=0.0) as world:
        pair.manual = True
        call = world.generate()
        world.first(await world.attempt())
        world.process.running.stop()
        await world.refused(call)
    (root,) = world._roots
    assert (root.attributes["baton.outcome"], root.attributes["baton.reason"]) == ("cancelled", "router_stopped")
