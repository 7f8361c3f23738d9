"""Prompts on a prefill worker, from command to unpinning: whatever ends them, in whatever phase, frees their pages."""

import secrets
from concurrent.futures import Future
from typing import Any

import pytest

from baton.process.telemetry.trace_context import new_trace
from baton.protos import kv_transfer_pb2, session_pb2
from tests.fixtures.held_runner import token
from tests.fixtures.session_client import SessionClient, eventually
from tests.fixtures.traced_logs import traced_lines
from tests.fixtures.worker_stack import BLOCKS, PrefillStack, prompt_command, running


def transfer_id() -> bytes:
    return secrets.token_bytes(16)


async def close(stack: PrefillStack, identity: bytes, complete: bool = True) -> bool:
    request = kv_transfer_pb2.CloseRequest(transfer_id=identity, complete=complete)
    return (await stack.transfers.Close(request, None)).valid


async def test_prompt_is_answered_immediately_and_pinned_until_its_reader_finishes() -> None:
    async with running(PrefillStack()) as stack, SessionClient(stack.endpoint) as router:
        identity = transfer_id()
        await router.send(prefill=prompt_command(5, identity, tokens=10, n=2))
        step = await router.one("first_step", 5)
        assert [list(output.token_ids) for output in step.outputs] == [[token(0, 10)], [token(1, 10)]]
        assert len(step.timings.chunk_ms) == 2
        assert stack.counts.held == 3
        assert await close(stack, identity)
        await stack.all_free()
        assert not stack.service.busy


@pytest.mark.parametrize("fields", [{}, {"pooling": session_pb2.Pooling(kind=session_pb2.POOLING_KIND_LAST)}])
async def test_cancel_while_computing_frees_the_pages_and_says_nothing_more(fields: dict[str, Any]) -> None:
    async with running(PrefillStack()) as stack, SessionClient(stack.endpoint) as router:
        stack.runner.hold()
        await router.send(prefill=prompt_command(1, b"" if fields else transfer_id(), **fields))
        await eventually(stack.runner.stepping.is_set)
        await router.cancel(1)
        await eventually(lambda: not stack.service.busy)
        stack.runner.let_go()
        await stack.all_free()
        assert not router.about("first_step", 1)


async def test_cancel_while_waiting_for_pages_leaves_the_others_alone() -> None:
    async with running(PrefillStack()) as stack, SessionClient(stack.endpoint) as router:
        first = transfer_id()
        await router.send(prefill=prompt_command(1, first, tokens=4 * BLOCKS - 40))
        await router.one("first_step", 1)
        await router.send(prefill=prompt_command(2, transfer_id(), tokens=80))
        await eventually(lambda: stack.loop.load.waiting_sequences == 1)
        await router.cancel(2)
        await eventually(lambda: stack.loop.load.waiting_sequences == 0)
        assert await close(stack, first)


async def test_cancel_while_pinned_makes_the_read_stale() -> None:
    async with running(PrefillStack()) as stack, SessionClient(stack.endpoint) as router:
        identity = transfer_id()
        await router.send(prefill=prompt_command(1, identity))
        await router.one("first_step", 1)
        await router.cancel(1)
        await stack.all_free()
        assert not await close(stack, identity)


async def test_deadline_ends_a_prompt_with_its_reason() -> None:
    async with running(PrefillStack()) as stack, SessionClient(stack.endpoint) as router:
        stack.runner.hold()
        await router.send(prefill=prompt_command(1, transfer_id(), time_left_ms=30))
        assert (await router.one("failed", 1)).reason == session_pb2.FAILURE_REASON_DEADLINE
        stack.runner.let_go()


async def test_logits_that_are_not_finite_fail_their_prompt_alone() -> None:
    async with running(PrefillStack(chunk_tokens=64)) as stack, SessionClient(stack.endpoint) as router:
        good = transfer_id()
        stack.runner.poison = {1}
        await router.send(prefill=prompt_command(1, transfer_id()))
        await router.send(prefill=prompt_command(2, good))
        assert (await router.one("failed", 1)).reason == session_pb2.FAILURE_REASON_NONFINITE
        await router.one("first_step", 2)
        assert await close(stack, good)


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"tokens": 100}, {"n": 0}, {"max_tokens": 0}])
async def test_uncomputable_prompt_is_rejected_and_its_reader_informed(wrong: dict[str, int]) -> None:
    async with running(PrefillStack()) as stack, SessionClient(stack.endpoint) as router:
        identity = transfer_id()
        await router.send(prefill=prompt_command(1, identity, **wrong))
        assert (await router.one("failed", 1)).reason == session_pb2.FAILURE_REASON_INVALID
        assert stack.table.snapshot(identity).dropped


async def test_transfer_id_in_use_is_rejected_without_harm_to_its_owner() -> None:
    async with running(PrefillStack()) as stack, SessionClient(stack.endpoint) as router:
        identity = transfer_id()
        await router.send(prefill=prompt_command(1, identity))
        await router.send(prefill=prompt_command(2, identity))
        assert (await router.one("failed", 2)).reason == session_pb2.FAILURE_REASON_TRANSFER
        await router.one("first_step", 1)
        assert await close(stack, identity)


async def test_reader_that_gave_up_before_the_prompt_came_saves_its_computation() -> None:
    async with running(PrefillStack()) as stack, SessionClient(stack.endpoint) as router:
        identity = transfer_id()
        assert not await close(stack, identity, complete=False)
        await router.send(prefill=prompt_command(1, identity))
        assert (await router.one("failed", 1)).reason == session_pb2.FAILURE_REASON_TRANSFER
        assert not stack.runner.plans


async def test_lease_of_unread_kv_expires() -> None:
    async with running(PrefillStack(lease_s=0.05)) as stack, SessionClient(stack.endpoint) as router:
        identity = transfer_id()
        one_step = prompt_command(1, identity, tokens=stack.chunk_tokens)  # a lease runs between two of them
        await router.send(prefill=one_step)
        await router.one("first_step", 1)
        await stack.all_free()
        assert stack.table.counters.expired == 1
        assert not await close(stack, identity)


async def test_prompts_of_a_router_that_stays_away_are_forgotten() -> None:
    async with running(PrefillStack(grace_s=0.05)) as stack:
        async with SessionClient(stack.endpoint) as router:
            await router.send(prefill=prompt_command(1, transfer_id()))
            await router.one("first_step", 1)
        await stack.all_free()
        assert not stack.service.busy


async def test_draining_worker_refuses_new_prompts_and_finishes_the_old() -> None:
    async with running(PrefillStack()) as stack, SessionClient(stack.endpoint) as router:
        old = transfer_id()
        stack.runner.hold()
        await router.send(prefill=prompt_command(1, old))
        await eventually(stack.runner.stepping.is_set)
        stack.service.draining = True
        await router.send(prefill=prompt_command(2, transfer_id()))
        assert (await router.one("failed", 2)).reason == session_pb2.FAILURE_REASON_DRAINING
        stack.runner.let_go()
        await router.one("first_step", 1)
        assert stack.service.busy
        assert await close(stack, old)
        assert not stack.service.busy


async def test_session_that_overflows_with_its_first_step_takes_its_prompt_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.worker.service.MAX_UNACKNOWLEDGED", 0)
    async with running(PrefillStack()) as stack, SessionClient(stack.endpoint) as router:
        await router.send(prefill=prompt_command(1, transfer_id()))
        await eventually(lambda: router.ended_with)
        await stack.all_free()
        assert not stack.service.busy and not stack.faults


async def test_prompt_with_failing_outcome_fails_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(PrefillStack()) as stack, SessionClient(stack.endpoint) as router:
        advance, odd = stack.transfers.advance, transfer_id()

        def fails_for_one(number: bytes, *arguments: Any) -> None:
            if number == odd:
                raise ValueError("a block beyond 32 bits")
            advance(number, *arguments)

        monkeypatch.setattr(stack.transfers, "advance", fails_for_one)
        await router.send(prefill=prompt_command(1, odd))
        await router.send(prefill=prompt_command(2, transfer_id()))
        assert (await router.one("failed", 1)).message == "internal error of the prefill worker"
        await router.one("first_step", 2)
        assert not router.about("failed", 2) and not stack.faults
        assert "a block beyond 32 bits" in caplog.text
        await router.cancel(2)
        await stack.all_free()


async def test_logprobs_are_sent_with_the_first_tokens_if_requested() -> None:
    async with running(PrefillStack()) as stack, SessionClient(stack.endpoint) as router:
        await router.send(prefill=prompt_command(1, transfer_id(), n=2, sampling={"logprobs": 2}))
        await router.send(prefill=prompt_command(2, transfer_id()))
        asked, other = await router.one("first_step", 1), await router.one("first_step", 2)
        assert [list(output.logprobs) for output in asked.outputs] == [[-0.5], [-0.5]]
        assert [list(output.top_token_ids) for output in asked.outputs] == [[0, 1], [0, 1]]
        assert not (other.outputs[0].logprobs or other.outputs[0].top_token_ids)
        await router.cancel(1)
        await router.cancel(2)


async def test_invalid_sampling_value_fails_its_request_alone() -> None:
    async with running(PrefillStack()) as stack, SessionClient(stack.endpoint) as router:
        await router.send(prefill=prompt_command(1, transfer_id(), sampling={"repetition_penalty": -1.0}))
        failed = await router.one("failed", 1)
        assert failed.reason == session_pb2.FAILURE_REASON_INVALID
        assert "repetition_penalty" in failed.message
        await router.send(prefill=prompt_command(2, transfer_id()))
        await router.one("first_step", 2)
        await router.cancel(2)


async def test_unexpected_error_ends_its_prompt_and_is_logged_with_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = new_trace()
    async with running(PrefillStack()) as stack, SessionClient(stack.endpoint) as router:
        added: Future[None] = Future()
        added.set_exception(RuntimeError("boom"))
        monkeypatch.setattr(stack.loop, "add", lambda request: added)
        with traced_lines("baton.worker.service") as lines:
            await router.send(prefill=prompt_command(1, transfer_id(), traceparent=trace.traceparent))
            assert (await router.one("failed", 1)).reason == session_pb2.FAILURE_REASON_UNSPECIFIED
        assert lines == [("prompt not queued: unexpected error", trace)]
