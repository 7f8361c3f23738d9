"""Several choices of a landed prompt: its full blocks are shared, its part-filled last block is copied on write."""

import pytest

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.request import BlockCopy, Computed, Drawn, EndReason, FirstToken, Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler

BLOCK = 4


@pytest.fixture
def scheduler():
    scheduler = Scheduler(BlockPool(12), BLOCK, max_step_tokens=16, max_sequences=8)
    yield scheduler
    scheduler.pool.check_conservation()


def start(scheduler: Scheduler, length: int, n: int, ended: frozenset[int] = frozenset()) -> None:
    params = SamplingParams(max_tokens=6, n=n)
    assert scheduler.reserve(Request(1, tuple(range(length)), params, ())) is not None
    reasons = [EndReason.STOP if choice in ended else None for choice in range(n)]
    scheduler.activate(1, [FirstToken(choice, 50 + choice, -0.5, end) for choice, end in enumerate(reasons)])


def test_a_part_filled_block_is_copied_for_all_but_its_last_writer(scheduler):
    start(scheduler, length=6, n=3)
    plan = scheduler.plan()
    written = [chunk.block_table[1] for chunk in plan.chunks]
    assert len(set(written)) == 3
    assert plan.copies == (BlockCopy(1, written[0]), BlockCopy(1, written[1]))
    assert written[2] == 1
    assert [chunk.block_table[0] for chunk in plan.chunks] == [0, 0, 0]
    scheduler.commit(plan, [Computed((Drawn(7, -0.5),)) for _ in plan.chunks])
    assert scheduler.plan().copies == ()


def test_a_prompt_that_fills_its_blocks_needs_no_copy(scheduler):
    start(scheduler, length=8, n=2)
    plan = scheduler.plan()
    assert plan.copies == ()
    tables = [list(chunk.block_table) for chunk in plan.chunks]
    assert tables[0][:2] == tables[1][:2] == [0, 1]
    assert tables[0][2] != tables[1][2]


def test_a_choice_that_ended_at_its_first_token_never_runs(scheduler):
    start(scheduler, length=6, n=3, ended=frozenset({0, 2}))
    plan = scheduler.plan()
    assert [chunk.samples[0].choice for chunk in plan.chunks] == [1]
    assert plan.copies == ()
    assert scheduler.batch.used_slots == 1


def test_the_block_to_go_on_in_is_not_shared(scheduler):
    start(scheduler, length=6, n=3)
    assert scheduler.pool.counts.held == 2 + 1
    tables = [sequence.held().blocks for sequence in scheduler.batch.running]
    assert [len(table) for table in tables] == [3, 2, 2]


def test_an_ended_choice_leaves_the_others_running(scheduler):
    params = SamplingParams(max_tokens=6, n=2, stop_token_ids=frozenset({9}))
    scheduler.reserve(Request(1, tuple(range(6)), params, ()))
    scheduler.activate(1, [FirstToken(choice, 50, -0.5, None) for choice in range(2)])
    results = [Computed((Drawn(9, -0.5),)), Computed((Drawn(7, -0.5),))]
    ended, goes_on = scheduler.commit(scheduler.plan(), results)
    assert (ended.end, goes_on.end) == (EndReason.STOP, None)
    assert scheduler.batch.used_slots == 1
    assert [chunk.samples[0].choice for chunk in scheduler.plan().chunks] == [1]
