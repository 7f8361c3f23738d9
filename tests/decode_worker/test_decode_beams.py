"""Beam searches and scores of the prompt on workers: over a transfer, and where the decode worker computes the prompt.

HeldRunner's likeliest tokens are always 0, 1 and so on, with log-probabilities 0, -1 and so on.
"""

from typing import Any

import pytest

from baton.protos import session_pb2
from tests.decode_worker.test_decode_local_prefill import alone
from tests.decode_worker.test_decode_service import pair
from tests.fixtures.session_client import SessionClient, eventually

LENGTH, STOP = session_pb2.END_REASON_LENGTH, session_pb2.END_REASON_STOP
BEAMS = {"beam_width": 2, "length_penalty": 1.0}


async def answers(router: SessionClient, attempt_id: int, choices: int, tokens: int) -> list[list[int]]:
    await eventually(lambda: len(router.tokens(attempt_id, choices - 1)) == tokens)
    return [router.tokens(attempt_id, choice) for choice in range(choices)]


async def test_beams_continue_from_prefill_and_are_sent_at_the_end() -> None:
    async with pair() as both:
        await both.ask(1, n=2, max_tokens=3, sampling=BEAMS)
        assert await answers(both.router, 1, 2, 3) == [[0, 0, 0], [0, 0, 1]]
        assert [output.end for output in both.router.outputs(1, 1)][-1] == LENGTH
        assert not (await both.to_prefill.one("first_step", 1)).outputs
        assert (await both.router.one("landed", 1)).bytes > 0


@pytest.mark.parametrize("logprobs", [False, True])
async def test_beam_search_ending_as_it_lands_is_answered(logprobs: bool) -> None:
    async with pair() as both:
        await both.ask(1, n=2, max_tokens=1, sampling={**BEAMS, **({"logprobs": 0} if logprobs else {})})
        assert await answers(both.router, 1, 2, 1) == [[0], [1]]
        assert [list(both.router.outputs(1, choice)[0].logprobs) for choice in range(2)] == (
            [[0.0], [-1.0]] if logprobs else [[], []]
        )


async def test_stop_token_ends_a_beam() -> None:
    async with pair() as both:
        await both.ask(1, n=1, max_tokens=3, sampling={**BEAMS, "stop_token_ids": [0]})
        assert await answers(both.router, 1, 1, 1) == [[0]]
        assert both.router.outputs(1)[-1].end == STOP


async def test_beams_of_a_locally_computed_prompt_are_answered() -> None:
    async with alone() as worker:
        for attempt_id, tokens in ((1, 3), (2, 1)):
            await worker.ask(attempt_id, n=2, max_tokens=tokens, sampling=BEAMS)
            assert await answers(worker.router, attempt_id, 2, tokens) == [[0] * tokens, [0] * (tokens - 1) + [1]]
            [first_step] = worker.router.about("first_step", attempt_id)
            assert not first_step.outputs and len(first_step.timings.chunk_ms) == 2


async def test_cancel_ends_a_search() -> None:
    async with alone() as worker:
        await worker.ask(1, n=2, max_tokens=20, sampling=BEAMS)
        await worker.router.one("first_step", 1)
        await worker.router.cancel(1)
        await eventually(lambda: not worker.decode.service.busy)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [({**BEAMS, "temperature": 0.5}, "temperature 0"), ({"beam_width": 2, "length_penalty": 99.0}, "length_penalty")],
)
async def test_search_without_meaning_is_refused(sampling: dict[str, Any], message: str) -> None:
    async with alone() as worker:
        await worker.ask(1, sampling=sampling)
        failed = await worker.router.one("failed", 1)
        assert failed.reason == session_pb2.FAILURE_REASON_INVALID and message in failed.message


def check_scores(router: SessionClient, attempt_id: int, tokens: int) -> None:
    told = router.about("prompt_scores", attempt_id)
    assert len(told) == 2  # chunks of at most 8 tokens
    assert [each.offset for each in told] == [1, 1 + len(told[0].logprobs)]
    assert [logprob for each in told for logprob in each.logprobs] == [-place / 4 for place in range(1, tokens)]
    assert [token_id for each in told for token_id in each.top_token_ids] == [0, 1] * (tokens - 1)
    kinds = [message.WhichOneof("event") for message in router.heard]
    assert kinds.index("first_step") > max(place for place, kind in enumerate(kinds) if kind == "prompt_scores")


async def test_prefill_worker_tells_the_scores_of_the_prompt() -> None:
    async with pair() as both:
        await both.ask(1, sampling={"prompt_logprobs": 2})
        await both.to_prefill.one("first_step", 1)
        check_scores(both.to_prefill, 1, tokens=10)
        await eventually(lambda: len(both.router.tokens(1)) == 4)


async def test_decode_worker_tells_the_scores_of_a_prompt_that_it_computes() -> None:
    async with alone() as worker:
        await worker.ask(1, sampling={"prompt_logprobs": 2})
        await worker.router.one("first_step", 1)
        check_scores(worker.router, 1, tokens=10)
        await worker.has_answer(1)
