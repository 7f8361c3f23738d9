"""Adoption of an answer by another router, in any phase: that router gets all of it once, and the first one no more."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.decode_worker import request_table as adoption
from baton.protos import session_pb2
from tests.decode_worker.test_decode_local_prefill import alone
from tests.decode_worker.test_decode_service import Pair, answer, pair
from tests.fixtures.held_runner import token
from tests.fixtures.session_client import SessionClient, eventually
from tests.fixtures.worker_stack import start_command

AS = 77  # attempt id at the adopting router


@asynccontextmanager
async def heir(both: Any) -> AsyncIterator[SessionClient]:
    async with SessionClient(both.decode.endpoint) as router:
        yield router


async def adopt(
    router: SessionClient, first: SessionClient, attempt_id: int, as_attempt_id: int = AS, time_left_ms: int = 0
) -> None:
    command = session_pb2.Adopt(
        router_id=first.router_id, attempt_id=attempt_id, as_attempt_id=as_attempt_id, time_left_ms=time_left_ms
    )
    await router.send(adopt=command)


async def hears_all(router: SessionClient, max_tokens: int, choice: int = 0, attempt_id: int = AS) -> None:
    await eventually(lambda: len(router.tokens(attempt_id, choice)) == max_tokens)
    assert router.tokens(attempt_id, choice) == answer(choice, 10, max_tokens)
    assert router.outputs(attempt_id, choice)[-1].end == session_pb2.END_REASON_LENGTH


async def runs(both: Pair, attempt_id: int, tokens: int, **fields: Any) -> None:
    """Ask for an answer, and stop its steps after `tokens` tokens have been sent."""
    both.decode.runner.hold_after(tokens - 1)
    await both.ask(attempt_id, **fields)
    await eventually(both.decode.runner.stepping.is_set)
    await eventually(lambda: len(both.router.tokens(attempt_id)) == tokens)


async def test_running_answer_is_adopted() -> None:
    async with pair() as both, heir(both) as second:
        await runs(both, 1, 3, n=2, max_tokens=60)
        await both.router.disconnect()
        await adopt(second, both.router, 1)
        await eventually(lambda: len(second.tokens(AS)) >= 3)
        both.decode.runner.let_go()
        for choice in range(2):
            await hears_all(second, 60, choice)
        await both.router.connect()
        await eventually(lambda: both.router.about("failed", 1))
        assert both.router.about("failed", 1)[0].reason == session_pb2.FAILURE_REASON_ADOPTED


async def test_first_router_of_an_adopted_answer_hears_and_cancels_nothing() -> None:
    async with pair() as both, heir(both) as second:
        await runs(both, 1, 3, max_tokens=60)
        await adopt(second, both.router, 1)
        await both.router.one("failed", 1)
        heard = len(both.router.tokens(1))
        await both.router.cancel(1)
        both.decode.runner.let_go()
        await hears_all(second, 60)
        assert len(both.router.tokens(1)) == heard


async def test_adopting_router_can_cancel_the_answer() -> None:
    async with pair() as both, heir(both) as second:
        await runs(both, 1, 3, max_tokens=60)
        await adopt(second, both.router, 1)
        await second.cancel(AS)
        await eventually(lambda: not both.decode.service.busy)
        both.decode.runner.let_go()
        assert len(second.tokens(AS)) < 60


async def test_answer_before_its_landing_is_adopted_from_the_first_token() -> None:
    async with pair() as both, heir(both) as second:
        both.prefill.runner.hold()
        await both.ask(1)
        await eventually(both.prefill.runner.stepping.is_set)
        await both.router.disconnect()
        await both.to_prefill.disconnect()
        await adopt(second, both.router, 1)
        both.prefill.runner.let_go()
        await hears_all(second, 4)
        assert second.about("landed", AS)


async def test_answer_between_landing_and_first_step_is_adopted() -> None:
    async with pair() as both, heir(both) as second:
        both.decode.runner.hold()
        await both.ask(1)
        await eventually(both.decode.runner.stepping.is_set)
        await adopt(second, both.router, 1)
        await eventually(lambda: len(second.tokens(AS)) == 1)
        both.decode.runner.let_go()
        await hears_all(second, 4)


async def test_adopted_answer_of_a_prefill_worker_is_sent_by_decode() -> None:
    async with pair() as both, heir(both) as second:
        both.prefill.runner.hold()
        await both.ask(1, max_tokens=1, n=2)
        await eventually(both.prefill.runner.stepping.is_set)
        await adopt(second, both.router, 1)
        await both.router.one("failed", 1)
        both.prefill.runner.let_go()
        for choice in range(2):
            await hears_all(second, 1, choice)


async def test_finished_answer_is_adopted_and_adopted_again() -> None:
    async with pair() as both, heir(both) as second, heir(both) as third:
        await both.ask(1, max_tokens=4, n=2)
        await eventually(lambda: not both.decode.service.busy and both.router.tokens(1, 1))
        await adopt(second, both.router, 1)
        for choice in range(2):
            await hears_all(second, 4, choice)
        await adopt(third, second, AS, 78)
        for choice in range(2):
            await hears_all(third, 4, choice, 78)


async def test_answer_that_ended_with_prefill_is_adopted() -> None:
    async with pair() as both, heir(both) as second:
        await both.ask(1, max_tokens=1)
        await both.to_prefill.one("first_step", 1)
        await eventually(lambda: len(both.decode.service._table.ended) == 1)
        await adopt(second, both.router, 1)
        await hears_all(second, 1)


@pytest.mark.parametrize("how", ["unknown", "cancelled", "grace over", "another router's"])
async def test_adoption_of_an_unknown_answer_is_refused(how: str) -> None:
    async with pair(grace_s=0.02 if how == "grace over" else 30.0) as both, heir(both) as second:
        if how == "cancelled":
            await runs(both, 1, 2, max_tokens=60)
            await both.router.cancel(1)
            await eventually(lambda: not both.decode.service.busy)
            both.decode.runner.let_go()
        elif how != "unknown":
            await both.ask(1)
            await eventually(lambda: not both.decode.service.busy and len(both.router.tokens(1)) == 4)
        if how == "grace over":
            await eventually(lambda: both.decode.service.report() or not both.decode.service._table.ended)
        await adopt(second, second if how == "another router's" else both.router, 1)
        assert (await second.one("failed", AS)).reason == session_pb2.FAILURE_REASON_UNKNOWN_ATTEMPT


async def test_unadopted_answer_is_freed_after_the_grace() -> None:
    async with pair({"grace_s": 0.05}, grace_s=0.05) as both:
        await runs(both, 1, 2, max_tokens=60)
        await both.router.disconnect()
        await both.to_prefill.disconnect()
        await eventually(lambda: not both.decode.service.busy)
        both.decode.runner.let_go()
        await both.decode.all_free()


async def test_logprobs_are_resent_with_every_token() -> None:
    async with pair() as both, heir(both) as second:
        await both.ask(1, sampling={"logprobs": 2})
        await eventually(lambda: not both.decode.service.busy and len(both.router.tokens(1)) == 4)
        await adopt(second, both.router, 1)
        await hears_all(second, 4)
        [output] = second.outputs(AS)
        assert list(output.logprobs) == [-0.5] * 4
        assert list(output.top_token_ids) == [0, 1] * 4
        assert list(output.top_logprobs) == [0.0, -1.0] * 4


async def test_replayed_answer_is_resent_from_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption, "PIECE_TOKENS", 2)
    async with pair() as both, heir(both) as second:
        await both.ask(1, tokens=10, max_tokens=8, answered_tokens=3, first_choice=2, sampling={"logprobs": 1})
        await eventually(lambda: not both.decode.service.busy and both.router.outputs(1, 2))
        await adopt(second, both.router, 1)
        await eventually(lambda: len(second.tokens(AS, 2)) == 8)
        assert second.tokens(AS, 2) == [8, 9, 10] + [token(2, 10 + place) for place in range(5)]
        assert [(each.offset, len(each.token_ids), len(each.logprobs)) for each in second.outputs(AS, 2)] == [
            (0, 3, 0),
            (3, 2, 2),
            (5, 2, 2),
            (7, 1, 1),
        ]
        assert [each.end for each in second.outputs(AS, 2)] == [0, 0, 0, session_pb2.END_REASON_LENGTH]


async def test_locally_computed_prompt_is_reported_to_the_adopting_router() -> None:
    async with alone() as worker, heir(worker) as second:
        worker.decode.runner.hold()
        await worker.ask(1)
        await eventually(worker.decode.runner.stepping.is_set)
        await adopt(second, worker.router, 1)
        await worker.router.one("failed", 1)
        worker.decode.runner.let_go()
        [first] = (await second.one("first_step", AS)).outputs
        assert (first.offset, list(first.token_ids)) == (0, [token(0, 10)])
        await eventually(lambda: sum(len(each.token_ids) for each in second.outputs(AS)) == 3)


def slot_limits(both: Pair, second: SessionClient) -> list[int]:
    """Report, and return the newest limits of the first and the second router. Together they have 8 slots."""
    both.decode.service.report()
    return [report.limit_slots for router in (both.router, second) for report in router.of_kind("report")[-1:]]


async def test_adopted_answer_counts_for_the_adopting_router() -> None:
    async with pair() as both, heir(both) as second:
        await runs(both, 1, 2, max_tokens=60, n=3)
        await eventually(lambda: slot_limits(both, second) == [3 + 2, 3])
        await adopt(second, both.router, 1)
        await eventually(lambda: slot_limits(both, second) == [3, 3 + 2])
        both.decode.runner.let_go()
        for choice in range(3):
            await hears_all(second, 60, choice)


async def test_adoption_may_set_another_deadline() -> None:
    async with pair() as both, heir(both) as second:
        await both.ask_decode_alone(1)
        await adopt(second, both.router, 1, time_left_ms=20)
        assert (await second.one("failed", AS)).reason == session_pb2.FAILURE_REASON_DEADLINE


async def test_attempt_id_in_use_is_not_reused(caplog: pytest.LogCaptureFixture) -> None:
    async with pair() as both, heir(both) as second:
        await both.ask_decode_alone(1)
        await second.send(start=start_command(AS, b"2" * 16, both.prefill.endpoint))
        await adopt(second, both.router, 1)
        await eventually(lambda: "duplicate attempt id" in caplog.text)
        assert len(both.decode.service._table) == 2
        await both.router.cancel(1)
        await second.cancel(AS)
