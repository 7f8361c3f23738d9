"""Latency objectives: which ones a request has, and what workers get of them."""

import asyncio

import pytest

from baton.protos import baton_pb2, session_pb2
from tests.router.conftest import Stack, encode, text_of
from tests.router.test_router_failures import begun

SERVICE = pytest.mark.parametrize("settings", [{"ttft_slo_ms": 30_000.0, "tbt_slo_ms": 40.0}], indirect=True)


@SERVICE
async def test_objectives_of_service_reach_both_workers(stack: Stack) -> None:
    await stack.generate(max_tokens=2)
    for command in (await stack.prefill.received("prefill"), await stack.decode.received("start")):
        assert 0 < command.first_token_in_ms <= 30_000 and command.tbt_slo_ms == 40


@SERVICE
async def test_objectives_of_a_request_replace_those_of_the_service(stack: Stack) -> None:
    sampling = baton_pb2.SamplingParams(max_tokens=2)
    asked = baton_pb2.GenerateRequest(text="hello", sampling=sampling, ttft_slo_ms=60_000.0)
    chat = baton_pb2.ChatRequest(sampling=sampling, tbt_slo_ms=20.0)
    chat.messages.add(role="user", content="hi")
    await stack.ready()
    for call in (stack.stub.Generate(asked, timeout=10), stack.stub.Chat(chat, timeout=10)):
        async for _ in call:
            pass
    generated, answered = await stack.decode.received("start"), await stack.decode.received("start", 2)
    assert 30_000 < generated.first_token_in_ms <= 60_000 and generated.tbt_slo_ms == 40
    assert answered.first_token_in_ms <= 30_000 and answered.tbt_slo_ms == 20


@SERVICE
async def test_readiness_probe_has_no_objectives(stack: Stack) -> None:
    await stack.complete()
    for probe in stack.decode.probes:
        assert not probe.start.HasField("first_token_in_ms") and not probe.start.tbt_slo_ms


@pytest.mark.parametrize("settings", [{"ttft_slo_ms": 1.0}], indirect=True)
async def test_late_first_token_has_a_negative_budget(stack: Stack) -> None:
    await stack.complete()
    stack.decode.report.limit_slots = 0
    await stack.until(lambda status: not any(worker.report.limit_slots for worker in status.workers))
    answer = asyncio.create_task(stack.generate(max_tokens=2))
    await stack.until(lambda status: status.queued_requests == 1)
    stack.decode.report.limit_slots = 64
    await answer
    assert (await stack.decode.received("start")).first_token_in_ms < 0


@SERVICE
async def test_retry_keeps_the_time_of_the_first_token(stack: Stack) -> None:
    await stack.ready()
    stack.pair.manual = True
    answer = asyncio.create_task(stack.generate(max_tokens=1))
    first = await stack.decode.received("start")
    stack.decode.fail(first.attempt_id, session_pb2.FAILURE_REASON_TRANSFER)
    second = await stack.decode.received("start", 2)
    stack.pair.first_step(second.attempt_id, encode("a"), ends=[session_pb2.END_REASON_LENGTH])
    stack.pair.landed(second.attempt_id)
    assert text_of(await answer) == "a"
    assert second.first_token_in_ms < first.first_token_in_ms, "a retry begins after a pause"


@SERVICE
async def test_retry_of_a_begun_answer_has_the_complete_ttft_objective(stack: Stack) -> None:
    call, attempt_id = await begun(stack)
    stack.decode.fail(attempt_id, session_pb2.FAILURE_REASON_TRANSFER)
    second = await stack.decode.received("start", 2)
    assert (second.answered_tokens, second.first_token_in_ms) == (1, 30_000)
    call.cancel()
