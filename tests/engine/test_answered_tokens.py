"""Requests that go on with an answer: what is refused, what room they need, and a mask that is late at prefill."""

from dataclasses import replace

import pytest

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.request import ChunkResult, Computed, Drawn, EndReason, Request, RequestRefused, RequestTooLong
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import PromptComputed
from baton.text.sampling import BeamParams, BeamStop
from tests.fixtures.prefill import prefill_scheduler

BLOCK = 4
LATE = Computed(late=True)
DRAWN = Computed((Drawn(7, -0.5),))
REQUEST = Request(1, tuple(range(1, 10)), SamplingParams(max_tokens=6), (), answered_tokens=4, first_choice=2)


def test_a_long_prompt_whose_mask_is_late_computes_only_its_last_token_again() -> None:
    scheduler = prefill_scheduler(BlockPool(8), BLOCK, chunk_tokens=16)
    scheduler.add(replace(REQUEST, prefill_only=True))
    late = step(scheduler, LATE)
    assert (late.computed_tokens, late.first, len(late.new_blocks)) == (8, None, 2)
    again = step(scheduler, LATE)
    assert (again.computed_tokens, again.first, again.new_blocks) == (8, None, ())
    done = step(scheduler, DRAWN)
    assert (done.computed_tokens, len(done.new_blocks)) == (9, 1)
    assert done.first is not None
    [first] = done.first
    assert (first.choice, first.token_id, first.end) == (2, 7, None)


def step(scheduler: Scheduler, result: ChunkResult) -> PromptComputed:
    plan = scheduler.plan()
    assert plan is not None
    [progress] = scheduler.commit(plan, [result])
    assert isinstance(progress, PromptComputed)
    return progress


def test_the_first_token_may_be_the_last_that_max_tokens_allows() -> None:
    scheduler = prefill_scheduler(BlockPool(8), BLOCK, chunk_tokens=16)
    scheduler.add(replace(REQUEST, params=SamplingParams(max_tokens=5), prefill_only=True))
    first = step(scheduler, DRAWN).first
    assert first is not None
    assert first[0].end is EndReason.LENGTH


def test_room_is_needed_for_the_rest_of_the_answer_alone() -> None:
    scheduler = Scheduler(BlockPool(3), BLOCK, max_step_tokens=16, max_sequences=2)
    scheduler.add(replace(REQUEST, params=SamplingParams(max_tokens=8)))  # 5 + 8 - 1 tokens fill 3 blocks
    with pytest.raises(RequestTooLong):
        scheduler.add(replace(REQUEST, request_id=2, params=SamplingParams(max_tokens=9)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"answered_tokens": 9},
        {"answered_tokens": 12},
        {"params": SamplingParams(max_tokens=4)},
        {"params": SamplingParams(max_tokens=6, n=2)},
        {"params": SamplingParams(max_tokens=6, prompt_logprobs=0)},
        {"params": SamplingParams(max_tokens=6, logprobs=4, beam=BeamParams(2, 1.0, BeamStop.FULL))},
    ],
    ids=["no prompt", "more than there is", "nothing to answer", "choices", "prompt scores", "beams"],
)
def test_what_cannot_go_on_is_refused(wrong: dict[str, object]) -> None:
    request = replace(REQUEST, **wrong)  # type: ignore[arg-type]
    for prefill_only in (True, False):
        with pytest.raises(RequestRefused):
            Scheduler(BlockPool(8), BLOCK, 16, 8).add(replace(request, prefill_only=prefill_only))
