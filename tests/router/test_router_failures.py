"""The whole router over gRPC with fake workers: cancelling, deadlines, failing and dying workers."""

import asyncio
import random
import time
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.process.serving.grpc_options import refuses_connections
from baton.protos import baton_pb2, session_pb2
from tests.router.conftest import Stack, encode, text_of
from tests.router.test_router_refusals import detail, refusal

NOTICED_S = 20.0  # a second or two, on a machine that is not busy; the grace of a session is longer


async def begun(stack: Stack, timeout: float = 10.0, **sampling: Any) -> tuple[Any, int]:
    """A call that has had its first token, and its attempt's id."""
    await stack.complete()
    stack.pair.manual = True
    request = baton_pb2.GenerateRequest(text="hello", sampling=baton_pb2.SamplingParams(max_tokens=50, **sampling))
    call = stack.stub.Generate(request, timeout=timeout)
    attempt_id = (await stack.prefill.received("prefill")).attempt_id
    stack.pair.first_step(attempt_id, encode("a"))
    assert (await call.read()).WhichOneof("event") == "started"
    assert (await call.read()).delta.text == "a"
    return call, attempt_id


async def under_way(stack: Stack) -> tuple[Any, int]:
    """A call that has had its second token, with its KV still being read."""
    call, attempt_id = await begun(stack)
    stack.pair.step(attempt_id, 1, encode("b"))
    assert (await call.read()).delta.text == "b"
    return call, attempt_id


async def idle(stack: Stack) -> None:
    """Nothing is charged any more."""
    await stack.until(
        lambda status: not status.active_requests and not any(w.in_flight_requests for w in status.workers)
    )


async def test_cancelling_reaches_both_workers(stack: Stack) -> None:
    call, attempt_id = await begun(stack)
    call.cancel()
    cancel = await stack.decode.received("cancel")
    assert (cancel.attempt_id, cancel.keep_landed) == (attempt_id, False)
    assert (await stack.prefill.received("cancel")).attempt_id == attempt_id
    await idle(stack)


async def test_a_request_cancelled_while_it_waits_is_never_dispatched(stack: Stack) -> None:
    await stack.ready()
    stack.decode.report.limit_slots = 0
    await stack.until(lambda status: not any(worker.report.limit_slots for worker in status.workers))
    call = stack.stub.Generate(baton_pb2.GenerateRequest(text="hello"), timeout=10)
    await stack.until(lambda status: status.queued_requests == 1)
    call.cancel()
    await stack.until(lambda status: status.queued_requests == 0)
    stack.decode.report.limit_slots = 64
    assert text_of(await stack.generate(max_tokens=3)) == "hel"
    assert len([c for c in stack.decode.commands if c.WhichOneof("command") == "start"]) == 1


async def test_whatever_the_phase_a_cancelled_request_leaves_nothing_behind(stack: Stack) -> None:
    await stack.ready()
    draw = random.Random(0)

    async def cancelled() -> None:
        call = stack.stub.Generate(baton_pb2.GenerateRequest(text="hello"), timeout=60)
        for _ in range(draw.randrange(6)):
            await call.read()
        call.cancel()

    stack.pair.script = lambda prompt, choice: encode("a") * 128
    await asyncio.gather(*(cancelled() for _ in range(60)))
    await idle(stack)
    assert (await stack.status()).queued_requests == 0
    assert text_of(await stack.generate(max_tokens=3)) == "aaa"


async def test_health_follows_readiness(stack: Stack) -> None:
    health: Any = health_pb2_grpc.HealthStub(stack.channel)
    await stack.ready()
    for name in ("", "baton.v1.BatonService"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    watch = health.Watch(health_pb2.HealthCheckRequest(service=""), timeout=10)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    await stack.prefill.stop()
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watch.cancel()


async def test_the_clients_deadline_cancels_on_both_workers(stack: Stack) -> None:
    call, attempt_id = await begun(stack, timeout=2.0)
    error = await refusal(call)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await stack.decode.received("cancel")).attempt_id == attempt_id
    await idle(stack)


@pytest.mark.parametrize("settings", [{"default_deadline_s": 2.0}], indirect=True)
async def test_the_servers_own_deadline_ends_a_request(stack: Stack) -> None:
    call, _ = await begun(stack)
    assert (await refusal(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await idle(stack)


@pytest.mark.parametrize("settings", [{"attempts": 1}], indirect=True)
async def test_the_last_failure_becomes_a_status(stack: Stack) -> None:
    call, attempt_id = await under_way(stack)
    stack.decode.fail(attempt_id, session_pb2.FAILURE_REASON_NO_ROOM, message="why")
    assert (await refusal(call)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await idle(stack)


@pytest.mark.parametrize("settings", [{"attempts": 1}], indirect=True)
@pytest.mark.parametrize("dies", ["prefill", "decode"])
async def test_a_worker_that_dies_mid_answer_is_noticed_before_its_sessions_grace(stack: Stack, dies: str) -> None:
    call, _ = await under_way(stack)
    began_s = time.monotonic()
    await getattr(stack, dies).stop()
    error = await refusal(call)
    assert time.monotonic() - began_s < NOTICED_S
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert detail(error, error_details_pb2.ErrorInfo).reason == "WORKER_LOST"
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0
    await stack.until(lambda status: not status.ready)


async def test_a_connection_that_breaks_and_comes_back_loses_nothing(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port is looked at once it is back, however long that takes: one that refuses is of a process that is gone."""
    call, attempt_id = await begun(stack)
    port, is_back = stack.decode.port, asyncio.Event()

    async def refuses(endpoint: str) -> bool:
        await is_back.wait()
        return await refuses_connections(endpoint)

    monkeypatch.setattr(stack.router._fleet._links[stack.decode.endpoint].link, "_refuses", refuses)
    await stack.decode.stop()
    stack.pair.landed(attempt_id)  # said while nobody listens
    stack.pair.step(attempt_id, 1, encode("b"), end=session_pb2.END_REASON_LENGTH)
    await stack.decode.start(port)
    is_back.set()
    assert (await call.read()).delta.text == "b"
    assert (await call.read()).finished.timings.transfer_bytes == 4096
    assert (await stack.status()).ready


async def test_a_worker_that_breaks_the_protocol_ends_the_request_as_internal(stack: Stack) -> None:
    call, attempt_id = await begun(stack)
    stack.pair.step(attempt_id, 0, encode("xb"))  # prefill said a
    assert (await refusal(call)).code() is grpc.StatusCode.INTERNAL
    assert (await stack.decode.received("cancel")).attempt_id == attempt_id


async def test_draining_finishes_what_was_accepted(stack: Stack) -> None:
    call, attempt_id = await begun(stack)
    draining = asyncio.create_task(stack.router.drain())
    stack.pair.landed(attempt_id)
    stack.pair.step(attempt_id, 1, encode("b"), end=session_pb2.END_REASON_LENGTH)
    assert (await call.read()).delta.text == "b"
    assert (await refusal(stack.stub.Generate(baton_pb2.GenerateRequest(text="x"), timeout=10))).code() is (
        grpc.StatusCode.UNAVAILABLE
    )
    assert (await call.read()).finished.usage.completion_tokens == 2
    await draining
