"""Requests on a decode worker, from command to last token: whatever ends them, in whatever phase, frees their pages."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from baton.kvtransfer.shared_memory import SharedMemoryTransport
from baton.kvtransfer.stream import StreamTransport
from baton.process.telemetry.trace_context import new_trace
from baton.protos import session_pb2, session_pb2_grpc, versions_pb2
from baton.versions import OWN
from tests.fixtures.held_runner import token
from tests.fixtures.loop_clock import put_forward
from tests.fixtures.session_client import SessionClient, eventually
from tests.fixtures.traced_logs import traced_lines
from tests.fixtures.worker_stack import (
    BLOCK_BYTES,
    BLOCKS,
    DecodeStack,
    PrefillStack,
    prompt_command,
    running,
    start_command,
)


class Pair:
    """Both workers and one router's sessions with them."""

    def __init__(self, prefill: PrefillStack, decode: DecodeStack, to_prefill: SessionClient, router: SessionClient):
        self.prefill, self.decode, self.to_prefill, self.router = prefill, decode, to_prefill, router

    async def ask(self, attempt_id: int, **fields: Any) -> None:
        identity = secrets.token_bytes(16)
        await self.router.send(start=start_command(attempt_id, identity, self.prefill.endpoint, **fields))
        await self.to_prefill.send(prefill=prompt_command(attempt_id, identity, **fields))

    async def ask_decode_alone(self, attempt_id: int, **fields: Any) -> None:
        """Its transfer stays parked on the prefill worker."""
        identity = secrets.token_bytes(16)
        parked = len(self.prefill.table)
        await self.router.send(start=start_command(attempt_id, identity, self.prefill.endpoint, **fields))
        await eventually(lambda: len(self.prefill.table) == parked + 1)


@asynccontextmanager
async def pair(prefill: dict[str, Any] | None = None, **decode: Any) -> AsyncIterator[Pair]:
    async with (
        running(PrefillStack(**(prefill or {}))) as first,
        running(DecodeStack(**decode)) as second,
        SessionClient(first.endpoint) as to_prefill,
        SessionClient(second.endpoint) as router,
    ):
        yield Pair(first, second, to_prefill, router)
        await second.all_free()
        await first.all_free()
        await eventually(lambda: not second.service.busy and not first.service.busy)


def answer(choice: int, prompt_tokens: int, max_tokens: int) -> list[int]:
    """HeldRunner names a token by the position before which it was drawn: the prompt's end, then one further each."""
    return [token(choice, prompt_tokens + offset) for offset in range(max_tokens)]


async def has_answer(
    pair: Pair, attempt_id: int, choice: int = 0, prompt_tokens: int = 10, max_tokens: int = 4
) -> None:
    expected = answer(choice, prompt_tokens, max_tokens)
    await eventually(lambda: len(pair.router.tokens(attempt_id, choice)) == max_tokens)
    assert pair.router.tokens(attempt_id, choice) == expected


@pytest.mark.parametrize(("transport", "kind"), [("shared_memory", SharedMemoryTransport), ("grpc", StreamTransport)])
async def test_answer_and_its_kv_equal_prefills_bit_for_bit(transport: Any, kind: type) -> None:
    async with pair(transport=transport) as both:
        both.prefill.runner.hold()
        await both.ask(1, tokens=10)
        await eventually(lambda: both.prefill.counts.held == 2)  # those of its first chunk
        both.prefill.runner.let_go()
        await has_answer(both, 1)
        landed = await both.router.one("landed", 1)
        assert (landed.transport, landed.bytes) == (kind.name, 3 * BLOCK_BYTES)
        source = both.prefill.memory.tensor.view(BLOCKS, BLOCK_BYTES)
        own = both.decode.storage.view(BLOCKS, BLOCK_BYTES)
        assert all(own[block].equal(source[block]) for block in range(3))  # both pools give low blocks first


async def test_all_choices_are_sent_and_a_finished_one_admits_another_request() -> None:
    async with pair(max_sequences=3) as both:
        await both.ask(1, n=3)
        await both.ask(2, n=2)
        for attempt_id, choices in ((1, 3), (2, 2)):
            for choice in range(choices):
                await has_answer(both, attempt_id, choice)


async def test_answer_of_one_token_ends_with_prefill() -> None:
    async with pair() as both:
        await both.ask(1, max_tokens=1)
        await both.to_prefill.one("first_step", 1)
        await eventually(lambda: len(both.decode.service._table.ended) == 1)
        assert not both.decode.service.busy and not both.decode.runner.plans


async def test_cancel_while_waiting_for_pages() -> None:
    async with pair() as both:
        await both.ask_decode_alone(1, tokens=60, max_tokens=40)
        await both.router.send(start=start_command(2, b"2" * 16, both.prefill.endpoint, tokens=60, max_tokens=40))
        await eventually(lambda: both.decode.service._admission.waiting == 1)
        await both.router.cancel(2)
        await eventually(lambda: both.decode.service._admission.waiting == 0)
        await both.router.cancel(1)


async def test_cancelled_requests_capacity_admits_a_waiting_one() -> None:
    async with pair() as both:
        await both.ask_decode_alone(1, tokens=60, max_tokens=40)
        await both.ask(2, tokens=60, max_tokens=40)
        await eventually(lambda: both.decode.service._admission.waiting == 1)
        await both.router.cancel(1)
        await has_answer(both, 2, prompt_tokens=60, max_tokens=40)


async def test_cancel_while_the_transfer_is_parked_ends_it_at_the_source_too() -> None:
    async with pair() as both:
        await both.ask_decode_alone(1)
        await both.router.cancel(1)
        await eventually(lambda: len(both.prefill.table) == 0)


async def test_cancel_while_running_stops_the_tokens() -> None:
    async with pair() as both:
        both.decode.runner.hold()
        await both.ask(1)
        await eventually(both.decode.runner.stepping.is_set)
        await both.router.cancel(1)
        await eventually(lambda: not both.decode.service.busy)
        both.decode.runner.let_go()
        await both.decode.all_free()
        assert not both.router.tokens(1)


async def test_deadline_ends_a_request_that_waits_for_kv() -> None:
    async with pair() as both:
        await both.router.send(start=start_command(1, b"1" * 16, both.prefill.endpoint, time_left_ms=50))
        assert (await both.router.one("failed", 1)).reason == session_pb2.FAILURE_REASON_DEADLINE


async def test_deadline_ends_a_request_that_runs() -> None:
    async with pair() as both:
        both.decode.runner.hold()
        await both.ask(1, time_left_ms=60_000)
        await eventually(both.decode.runner.stepping.is_set)
        put_forward(60.0)
        assert (await both.router.one("failed", 1)).reason == session_pb2.FAILURE_REASON_DEADLINE
        both.decode.runner.let_go()


async def test_logits_that_are_not_finite_fail_their_request_alone() -> None:
    async with pair() as both:
        both.decode.runner.poison = {1}
        await both.ask(1)
        await both.ask(2)
        assert (await both.router.one("failed", 1)).reason == session_pb2.FAILURE_REASON_NONFINITE
        await has_answer(both, 2)


async def test_failure_at_prefill_fails_the_transfer() -> None:
    async with pair() as both:
        both.prefill.runner.poison = {1}
        await both.ask(1)
        assert (await both.router.one("failed", 1)).reason == session_pb2.FAILURE_REASON_TRANSFER


async def test_missing_prefill_worker_fails_the_transfer() -> None:
    async with pair() as both:
        await both.router.send(start=start_command(1, b"1" * 16, "127.0.0.1:1"))
        assert (await both.router.one("failed", 1)).reason == session_pb2.FAILURE_REASON_TRANSFER
        assert not both.decode.peers._pairings


async def test_oversized_request_is_rejected() -> None:
    async with pair() as both:
        for attempt_id, wrong in enumerate(({"tokens": 0}, {"tokens": 97}, {"n": 0}, {"n": 9}, {"max_tokens": 0})):
            await both.router.send(start=start_command(attempt_id, b"1" * 16, both.prefill.endpoint, **wrong))
            failed = await both.router.one("failed", attempt_id)
            assert failed.reason == session_pb2.FAILURE_REASON_INVALID


async def test_two_routers_may_use_the_same_attempt_id() -> None:
    async with pair() as both, SessionClient(both.decode.endpoint) as other:
        both.decode.runner.hold()
        await both.ask(1)
        await eventually(both.decode.runner.stepping.is_set)
        await other.cancel(1)
        await other.send(start=start_command(1, b"1" * 16, both.prefill.endpoint, time_left_ms=30))
        await other.one("failed", 1)
        both.decode.runner.let_go()
        await has_answer(both, 1)
        assert not both.router.about("failed", 1)


async def test_repeated_attempt_starts_once(caplog: pytest.LogCaptureFixture) -> None:
    async with pair() as both:
        await both.ask_decode_alone(1)
        await both.router.send(start=start_command(1, b"1" * 16, both.prefill.endpoint))
        await both.ask_decode_alone(2)  # commands are taken in their order: the one before has been by then
        assert [answer.attempt_id for answer in both.decode.service._table] == [1, 2]
        assert "duplicate attempt id 1" in caplog.text
        await both.router.cancel(1)
        await both.router.cancel(2)


async def test_reconnecting_router_gets_every_token_once() -> None:
    async with pair() as both:
        both.decode.runner.hold()
        await both.ask(1, max_tokens=20)
        await eventually(both.decode.runner.stepping.is_set)
        await both.router.disconnect()
        both.decode.runner.let_go()
        await both.router.connect()
        await has_answer(both, 1, max_tokens=20)


async def test_requests_of_a_router_that_stays_away_are_aborted() -> None:
    async with pair(grace_s=0.05) as both:
        await both.ask_decode_alone(1)
        await both.router.disconnect()
        await both.decode.all_free()
        await both.router.connect()
        assert both.router.welcome is not None and not both.router.welcome.resumed


async def test_worker_that_stops_lets_everything_go() -> None:
    prefill, decode = PrefillStack(), DecodeStack()
    await prefill.start()
    await decode.start()
    async with SessionClient(decode.endpoint) as router:
        await router.send(start=start_command(1, b"1" * 16, prefill.endpoint))
        await eventually(lambda: len(prefill.table) == 1)
        await decode.stop()
        await eventually(lambda: router.ended_with)
    assert decode.counts.held == 0 and not decode.service._tasks
    await eventually(lambda: len(prefill.table) == 0)
    await prefill.stop()


async def test_unexpected_error_ends_its_request_and_is_logged_with_its_trace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trace = new_trace()
    async with pair() as both:
        monkeypatch.setattr(both.decode.reader, "pull", None)
        command = start_command(1, b"1" * 16, both.prefill.endpoint, traceparent=trace.traceparent)
        with traced_lines("baton.worker.service") as lines:
            await both.router.send(start=command)
            assert (await both.router.one("failed", 1)).reason == session_pb2.FAILURE_REASON_UNSPECIFIED
        assert "NoneType" in caplog.text
        assert lines == [("answer failed: unexpected error", trace)]


async def test_logprobs_are_sent_with_every_token_and_the_first_by_the_transfer() -> None:
    async with pair() as both:
        await both.ask(1, sampling={"logprobs": 2})
        await has_answer(both, 1)
        outputs = both.router.outputs(1)
        assert [output.offset for output in outputs] == [0, 2, 3]
        assert [list(output.logprobs) for output in outputs] == [[-0.5, -0.5], [-0.5], [-0.5]]
        assert [list(output.top_token_ids) for output in outputs] == [[0, 1, 0, 1], [0, 1], [0, 1]]
        assert list(outputs[0].top_logprobs) == [0.0, -1.0, 0.0, -1.0]


async def test_without_being_asked_no_logprobs_come() -> None:
    async with pair() as both:
        await both.ask(1)
        await has_answer(both, 1)
        assert not any(output.logprobs or output.top_token_ids for output in both.router.outputs(1))


async def test_router_without_a_common_protocol_is_rejected_with_both_versions() -> None:
    async with running(DecodeStack()) as decode, grpc.aio.insecure_channel(decode.endpoint) as channel:
        call = session_pb2_grpc.SessionServiceStub(channel).Connect()
        later = versions_pb2.Versions(release="9.0.0", protocol=9, oldest_protocol=9)
        hello = session_pb2.Hello(router_id=secrets.token_bytes(16), versions=later)
        await call.write(session_pb2.ConnectRequest(hello=hello))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "release 9.0.0 (protocol 9)" in str(refused.value.details()) and str(OWN) in str(refused.value.details())


async def test_enum_value_of_a_later_release_is_refused_by_name() -> None:
    async with pair() as both:
        await both.router.send(start=start_command(1, b"1" * 16, "", n=2, sampling={"beam_width": 2, "beam_stop": 99}))
        failed = await both.router.one("failed", 1)
        assert failed.reason == session_pb2.FAILURE_REASON_INVALID and "beam_stop" in failed.message
