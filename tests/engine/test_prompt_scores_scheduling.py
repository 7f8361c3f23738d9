"""Log-probabilities of a prompt in the schedulers: every token once and in order, whatever happens to the prompt."""

import pytest

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.swap_space import SwapSpace
from baton.engine.request import Computed, Drawn, Plan, Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import PromptComputed
from tests.fixtures.prefill import prefill_request, prefill_scheduler

BLOCK = 4
ROOT = b"r" * 32


def results(plan: Plan) -> list[Computed]:
    return [
        Computed(
            tuple(Drawn(1, 0.0) for _ in chunk.samples),
            tuple(Drawn(token_id, 0.0) for token_id in (chunk.scored.token_ids if chunk.scored else ())),
        )
        for chunk in plan.chunks
    ]


def scored(request_id: int, tokens: int, max_tokens: int = 2) -> Request:
    return Request(request_id, tuple(range(100, 100 + tokens)), SamplingParams(max_tokens, prompt_logprobs=0), ())


@pytest.mark.parametrize("swap_slots", [0, 10])
def test_prompt_preempted_halfway_is_scored_once(swap_slots: int) -> None:
    scheduler = Scheduler(BlockPool(18), BLOCK, 5, 4, swap=SwapSpace(swap_slots))
    scheduler.add(Request(1, tuple(range(24)), SamplingParams(20), ()), ROOT)
    scheduler.add(scored(2, 41), ROOT)
    told: list[int] = []
    lost_halfway = False
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        for outcome in scheduler.commit(plan, results(plan)):
            if isinstance(outcome, PromptComputed) and outcome.request_id == 2:
                told += [token.token_id for token in outcome.prompt]
        lost_halfway |= scheduler.counters.preemptions > 0 and 0 < len(told) < 40
    assert lost_halfway
    assert told == list(range(101, 141))


def test_prompt_in_the_cache_is_computed_again_for_its_scores() -> None:
    scheduler = Scheduler(BlockPool(20), BLOCK, 64, 4)
    for request_id in (1, 2):
        scheduler.add(scored(request_id, 21), ROOT)
        plan = scheduler.plan()
        assert plan is not None
        [chunk] = plan.chunks
        assert chunk.scored is not None and len(chunk.scored.token_ids) == 20
        scheduler.commit(plan, results(plan))
        scheduler.abort(request_id)


def test_prefill_worker_scores_every_chunk_and_reads_no_cache() -> None:
    scheduler = prefill_scheduler(BlockPool(20), BLOCK, chunk_tokens=8)
    hashes = tuple(bytes([block]) * 32 for block in range(5))
    for request_id in (1, 2):
        request = prefill_request(request_id, range(100, 121), SamplingParams(2, prompt_logprobs=0), hashes)
        scheduler.add(request)
        told: list[int] = []
        while (plan := scheduler.plan()) is not None:
            [progress] = scheduler.commit(plan, results(plan))
            told += [token.token_id for token in progress.prompt]
        assert told == list(range(101, 121))
        assert progress.cached_tokens == 0
        scheduler.abort(request_id)
    assert scheduler.pool.counts.cached == 5, "it is there for others"


def test_prompt_with_a_late_mask_is_scored_once() -> None:
    scheduler = Scheduler(BlockPool(20), BLOCK, 64, 4)
    scheduler.add(scored(1, 21), ROOT)
    tokens: list[int] = []
    for late in (True, True, False):
        plan = scheduler.plan()
        assert plan is not None
        made = [Computed(late=True, prompt=each.prompt) if late else each for each in results(plan)]
        for outcome in scheduler.commit(plan, made):
            tokens += [token.token_id for token in outcome.prompt] if isinstance(outcome, PromptComputed) else []
    assert tokens == list(range(101, 121))
