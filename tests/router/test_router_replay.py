"""The whole router over gRPC with fake workers: answers that go on after a worker has died, hung, drained or failed."""

import asyncio
import time
from typing import Any

import grpc
import pytest

from baton.protos import admin_pb2, baton_pb2, session_pb2
from tests.fixtures.traced_logs import traced_lines
from tests.router.conftest import READY_S, Stack, echo, encode, text_of, tokens_of
from tests.router.test_router_failures import begun
from tests.router.test_router_refusals import refusal

NOTICED_S = 20.0  # less than the grace of a session, in which no client is connected


async def cut(stack: Stack, at: int, **sampling: Any) -> tuple["asyncio.Task[list[Any]]", Any]:
    """A request of which decode has said so many tokens of each choice, and will say no more; with its Start."""
    await stack.ready()
    stack.pair.limits = [at]
    responses: list[Any] = []
    has_all = asyncio.Event()
    request = baton_pb2.GenerateRequest(text="hello", sampling=baton_pb2.SamplingParams(**sampling))

    async def read() -> list[Any]:
        async for response in stack.stub.Generate(request, timeout=30):
            responses.append(response)
            if all(len(tokens_of(responses, choice)) >= at for choice in range(sampling.get("n", 1))):
                has_all.set()
        return responses

    answer = asyncio.create_task(read())
    if "stop" not in sampling:  # those hold back
        await asyncio.wait_for(has_all.wait(), READY_S)
    return answer, await stack.decode.received("start")


async def replayed(stack: Stack) -> Any:
    """The first Start that goes on with an answer."""
    count = 1
    while not (start := await stack.decode.received("start", count)).answered_tokens:
        count += 1
    return start


async def restart(stack: Stack, epoch: int = 2) -> None:
    """Decode dies, and another process of that name takes its place once the router has noticed."""
    port = stack.decode.port
    await stack.decode.stop()
    stack.decode.forget_sessions()
    stack.decode.epoch = epoch
    await stack.until(lambda status: not status.ready)
    await stack.decode.start(port)


async def test_an_answer_goes_on_where_its_decode_worker_died(stack: Stack) -> None:
    answer, start = await cut(stack, 5, max_tokens=17)
    began_s = time.monotonic()
    await restart(stack)
    again = await replayed(stack)
    assert time.monotonic() - began_s < NOTICED_S
    assert again.attempt_id != start.attempt_id and again.transfer_id != start.transfer_id
    assert (again.answered_tokens, again.first_choice, again.sampling.max_tokens) == (5, 0, 17)
    assert list(again.token_ids) == encode("hello") + echo(encode("hello"), 0)[:5]
    assert len(again.block_hashes) == 10 // 4 and again.block_hashes[0] == start.block_hashes[0]
    responses = await answer
    assert tokens_of(responses) == echo(encode("hello"), 0)[:17]
    assert responses[-1].finished.usage.completion_tokens == 17


async def test_every_unfinished_choice_goes_on_by_itself(stack: Stack) -> None:
    answer, _ = await cut(stack, 3, max_tokens=9, n=3)
    await restart(stack)
    responses = await answer
    for choice in range(3):
        assert tokens_of(responses, choice) == echo(encode("hello"), choice)[:9]
    starts = [command.start for command in stack.decode.commands if command.start.answered_tokens]
    assert sorted((s.first_choice, s.answered_tokens, s.sampling.n) for s in starts) == [(c, 3, 1) for c in range(3)]


async def test_a_choice_that_only_prefill_knew_of_is_made_again(stack: Stack) -> None:
    await stack.ready()
    stack.pair.manual = True
    sampling = baton_pb2.SamplingParams(max_tokens=4, n=2)
    call = stack.stub.Generate(baton_pb2.GenerateRequest(text="hello", sampling=sampling), timeout=READY_S)
    start = await stack.decode.received("start")
    stack.pair.landed(start.attempt_id)
    stack.pair.step(start.attempt_id, 0, echo(encode("hello"), 1)[:2], choice=1)
    responses = [await call.read(), await call.read()]
    assert tokens_of(responses, 1)  # of the other choice decode will never speak if its first token has ended it
    stack.pair.manual = False
    stack.prefill.fail(start.attempt_id, session_pb2.FAILURE_REASON_TRANSFER)
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    assert [tokens_of(responses, choice) for choice in range(2)] == [echo(encode("hello"), c)[:4] for c in range(2)]


@pytest.mark.parametrize("settings", [{"session_silence_s": 1.0}], indirect=True)
async def test_an_answer_of_a_worker_that_hangs_goes_on_and_its_late_output_is_dropped(stack: Stack) -> None:
    answer, start = await cut(stack, 4, max_tokens=8)
    stack.decode.silent = True
    await stack.until(lambda status: not status.ready)
    stack.decode.silent = False
    again = await replayed(stack)
    stack.pair.step(start.attempt_id, 4, encode("X"))
    assert again.answered_tokens == 4
    assert text_of(await answer) == "hellohel"


@pytest.mark.parametrize("settings", [{"no_prefill_worker": "local"}], indirect=True)
async def test_where_prefill_died_decode_computes_the_prompt_itself(stack: Stack) -> None:
    call, _ = await begun(stack)
    stack.pair.script = lambda prompt, choice: encode("a" + 49 * "b")
    stack.pair.manual = False
    await stack.prefill.stop()
    again = await replayed(stack)
    assert (again.prefill_endpoint, again.answered_tokens) == ("", 1)
    assert (await stack.decode.received("cancel")).keep_landed, "what has landed of it is thrown away"
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    assert text_of(responses) == 49 * "b"
    await stack.prefill.start(stack.prefill.port)


@pytest.mark.parametrize("settings", [{"max_wait_s": 1.0}], indirect=True)
async def test_without_another_worker_an_answer_waits_a_while_and_then_ends_unavailable(stack: Stack) -> None:
    await stack.ready()
    stack.pair.limits = [4]
    sampling = baton_pb2.SamplingParams(max_tokens=8)
    call = stack.stub.Generate(baton_pb2.GenerateRequest(text="hello", sampling=sampling), timeout=30)
    await stack.decode.received("start")
    began_s = time.monotonic()  # before the router can notice
    await stack.decode.stop()
    error = await refusal(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert 0.9 < time.monotonic() - began_s < NOTICED_S
    await stack.decode.start(stack.decode.port)


async def test_the_trace_and_the_explanation_tell_of_every_attempt(stack: Stack) -> None:
    with traced_lines("baton.router.request.run") as lines:
        answer, _ = await cut(stack, 5, max_tokens=9)
        await restart(stack)
        await answer
    root = next(s for s in reversed(stack.telemetry.spans) if s.name == "text_completion tiny")
    assert [trace for line, trace in lines if "; retrying" in line] == [root.identity]
    assert root.attributes["baton.attempts"] == 2
    assert root.attributes["baton.resumes"] == 1
    longest_ms = root.attributes["baton.longest_resume_ms"]
    assert isinstance(longest_ms, float) and longest_ms > 0.0
    spans = [s for s in stack.telemetry.spans if s.name == "attempt" and s.parent == root.identity]
    first, second = [{k.removeprefix("baton.attempt."): v for k, v in each.attributes.items()} for each in spans]
    assert (first["number"], first["decode"], first["failed_worker"]) == (1, "decode-0", "decode-0")
    assert first["failure"] in ("WORKER_LOST", "WORKER_DIED") and first["message"]
    assert second["number"] == 2 and "failure" not in second and second["first_token"] == 5
    assert second["stood_still_ms"] == longest_ms
    request_id = root.attributes["gen_ai.response.id"]
    assert root.identity is not None
    for given in (request_id, f"cmpl-{request_id}", root.identity.trace_id):
        told = await stack.admin.Explain(admin_pb2.ExplainRequest(request_id=given))
        assert told.request_id == request_id and len(told.attempts) == 2
        assert all(each.actual["ttft_ms"] > 0.0 for each in told.attempts)
