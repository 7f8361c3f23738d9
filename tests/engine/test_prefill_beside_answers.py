"""Prompts for other workers and answers on one scheduler: what the prompts take, and what they keep."""

from dataclasses import replace

import pytest

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.request import Computed, Drawn, NonFinite, Request, RequestTooLong
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import PromptComputed, SchedulerOutcome, TokenMade
from tests.fixtures.prefill import prefill_request

BLOCK = 4
PARAMS = SamplingParams(max_tokens=12)


def request(request_id: int, tokens: int) -> Request:
    return Request(request_id, tuple(range(tokens)), PARAMS, ())


def step(scheduler: Scheduler) -> list[SchedulerOutcome]:
    plan = scheduler.plan()
    assert plan is not None
    return scheduler.commit(plan, [Computed(tuple(Drawn(7, 0.0) for _ in chunk.samples)) for chunk in plan.chunks])


def pinned(outcomes: list[SchedulerOutcome]) -> list[int]:
    return [each.request_id for each in outcomes if isinstance(each, PromptComputed) and each.first is not None]


def test_prefill_only_prompts_take_no_slot() -> None:
    scheduler = Scheduler(BlockPool(16), BLOCK, 64, max_sequences=1)
    scheduler.add(request(1, 5))
    for number in (2, 3):
        scheduler.add(prefill_request(number, range(9), replace(PARAMS, n=3)))
    assert pinned(step(scheduler)) == [2, 3]
    assert (scheduler.batch.used_slots, sorted(scheduler.batch.pinned)) == (1, [2, 3])
    assert isinstance(step(scheduler)[0], TokenMade)


def test_scheduler_without_slots_takes_prefill_only_prompts_alone() -> None:
    scheduler = Scheduler(BlockPool(16), BLOCK, 64, max_sequences=0)
    scheduler.add(prefill_request(1, range(9), PARAMS))
    with pytest.raises(RequestTooLong, match="1 batch slots; there are 0"):
        scheduler.add(request(2, 5))


def test_answers_that_outgrow_the_pool_preempt_no_prefill_only_prompt() -> None:
    scheduler = Scheduler(BlockPool(6), BLOCK, 16, max_sequences=4)
    scheduler.add(request(1, 3))
    step(scheduler)
    scheduler.add(prefill_request(2, range(13), PARAMS))
    assert pinned(step(scheduler)) == [2]
    while (plan := scheduler.plan()) is not None:
        scheduler.commit(plan, [Computed((Drawn(7, 0.0),))])
    assert scheduler.counters.preemptions > 0, "the answer waits until the prompt was read"
    assert sorted(scheduler.batch.pinned) == [2]
    assert scheduler.abort(2)
    assert scheduler.plan() is not None


def test_prefill_only_prompt_waits_for_blocks_of_answers_that_run() -> None:
    scheduler = Scheduler(BlockPool(6), BLOCK, 3, max_sequences=4)
    scheduler.add(request(1, 3))
    step(scheduler)
    scheduler.add(prefill_request(2, range(13), PARAMS))
    seen: list[int] = []
    while not seen:
        seen = pinned(step(scheduler))
    assert scheduler.counters.preemptions == 0
    assert scheduler.batch.running_sequences == 0, "the answer ended first"


def test_prefill_only_prompts_are_left_no_room_to_grow() -> None:
    scheduler = Scheduler(BlockPool(6), BLOCK, 64, max_sequences=8)
    for number in (1, 2, 3):
        scheduler.add(prefill_request(number, range(8), PARAMS))
    assert pinned(step(scheduler)) == [1, 2, 3]


def test_the_size_of_chunks_may_change_between_two_plans() -> None:
    scheduler = Scheduler(BlockPool(6), BLOCK, 8, max_sequences=0)
    scheduler.add(prefill_request(1, range(20), PARAMS))
    ends = []
    for tokens in (8, 3, 16):
        scheduler.max_step_tokens = tokens
        [outcome] = step(scheduler)
        assert isinstance(outcome, PromptComputed)
        ends.append(outcome.computed_tokens)
    assert ends == [8, 11, 20]


def test_failed_prefill_only_prompt_releases_its_blocks_and_answers_continue() -> None:
    scheduler = Scheduler(BlockPool(8), BLOCK, 64, max_sequences=2)
    scheduler.add(request(1, 3))
    scheduler.add(prefill_request(2, range(9), PARAMS))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(plan, [Computed((Drawn(7, 0.0),)), NonFinite()])
    assert (scheduler.pool.counts.held, sorted(scheduler.batch.requests)) == (1, [1])
