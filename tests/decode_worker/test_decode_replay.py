"""Commands that go on with an answer which an earlier attempt began: offsets and choices on the wire."""

from typing import Any

import pytest

from baton.protos import session_pb2
from tests.decode_worker.test_decode_local_prefill import alone
from tests.decode_worker.test_decode_service import pair
from tests.fixtures.held_runner import token
from tests.fixtures.session_client import SessionClient, eventually

GOES_ON: dict[str, Any] = {"tokens": 10, "max_tokens": 7, "answered_tokens": 3, "first_choice": 2}
REST = [token(2, 10 + place) for place in range(4)]


def told(router: SessionClient, attempt_id: int) -> list[tuple[int, int, list[int], int]]:
    outputs = [output for step in router.of_kind("step_outputs") for output in step.outputs]
    return [
        (output.choice, output.offset, list(output.token_ids), output.end)
        for output in outputs
        if output.attempt_id == attempt_id
    ]


async def ends(router: SessionClient, attempt_id: int) -> None:
    await eventually(lambda: any(end for *_, end in told(router, attempt_id)))


async def test_first_output_after_a_pull_repeats_the_first_token_at_its_offset() -> None:
    async with pair() as both:
        await both.ask(1, **GOES_ON)
        await ends(both.router, 1)
        length = session_pb2.END_REASON_LENGTH
        assert told(both.router, 1) == [(2, 3, REST[:2], 0), (2, 5, REST[2:3], 0), (2, 6, REST[3:], length)]
        [first] = (await both.to_prefill.one("first_step", 1)).outputs
        assert (first.choice, first.offset, list(first.token_ids), first.end) == (2, 3, REST[:1], 0)


async def test_locally_computed_prompt_is_reported_like_any() -> None:
    async with alone() as worker:
        await worker.ask(1, **GOES_ON)
        await ends(worker.router, 1)
        [first] = (await worker.router.one("first_step", 1)).outputs
        assert (first.choice, first.offset, list(first.token_ids)) == (2, 3, REST[:1])
        assert [output[1] for output in told(worker.router, 1)] == [4, 5, 6]


async def test_some_choices_of_a_request_begin_at_their_number() -> None:
    async with pair() as both:
        await both.ask(1, n=2, first_choice=3, max_tokens=2)
        await eventually(lambda: len(told(both.router, 1)) == 2)
        assert sorted(output[:3] for output in told(both.router, 1)) == [
            (choice, 0, [token(choice, 10), token(choice, 11)]) for choice in (3, 4)
        ]


async def test_answer_that_lacks_one_token_ends_with_prefill() -> None:
    async with pair() as both:
        await both.ask(1, tokens=10, max_tokens=4, answered_tokens=3)
        [first] = (await both.to_prefill.one("first_step", 1)).outputs
        assert (first.offset, first.end) == (3, session_pb2.END_REASON_LENGTH)
        await eventually(lambda: not both.decode.service.busy)


async def test_prompt_logprobs_are_not_resent() -> None:
    async with alone() as worker:
        await worker.ask(1, sampling={"prompt_logprobs": 0}, **GOES_ON)
        await ends(worker.router, 1)
        assert not worker.router.about("prompt_scores", 1)


@pytest.mark.parametrize("wrong", [{"answered_tokens": 10}, {"answered_tokens": 4, "max_tokens": 4}, {"n": 2}])
async def test_unresumable_request_is_rejected_by_both_workers(wrong: dict[str, Any]) -> None:
    async with pair() as both:
        await both.ask(1, **{**GOES_ON, **wrong})
        for router in (both.router, both.to_prefill):
            assert (await router.one("failed", 1)).reason in (
                session_pb2.FAILURE_REASON_INVALID,
                session_pb2.FAILURE_REASON_TRANSFER,  # where the other one was first to refuse
            )


async def test_longest_request_fits_however_much_of_it_is_answered() -> None:
    async with alone() as worker:
        await worker.ask(1, tokens=90, max_tokens=60, answered_tokens=50)  # the model takes 100
        await worker.router.one("first_step", 1)
        await ends(worker.router, 1)
        assert not worker.router.about("failed", 1)
