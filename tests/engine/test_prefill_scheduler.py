"""Prompts in chunks: what each step computes, when blocks become readable, and who holds them."""

import pytest

from baton.engine.kv_cache.block_pool import BlockCounts, BlockPool
from baton.engine.request import Computed, Drawn, EndReason, NonFinite, Plan, Request, RequestRefused
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import RequestFailed, SchedulerOutcome
from tests.fixtures.prefill import prefill_request, prefill_scheduler

BLOCK = 4
STOP = 99


def prompt(request_id: int, length: int, n: int = 1, max_tokens: int = 10) -> Request:
    """A prompt whose tokens are its positions, so that equal lengths share their prefix."""
    hashes = tuple(b"block %d" % index for index in range(length // BLOCK))
    params = SamplingParams(max_tokens=max_tokens, n=n, stop_token_ids=frozenset({STOP}))
    return prefill_request(request_id, tuple(range(length)), params, hashes)


def private_prompt(request_id: int, length: int) -> Request:
    """A prompt that shares nothing."""
    return prefill_request(request_id, tuple(range(length)), SamplingParams(max_tokens=10), ())


@pytest.fixture
def scheduler():
    scheduler = prefill_scheduler(BlockPool(8), BLOCK, chunk_tokens=8)
    yield scheduler
    scheduler.pool.check_conservation()


def spans(plan: Plan | None) -> list[tuple[int, int, int]]:
    assert plan is not None
    return [(chunk.request_id, chunk.start, chunk.end) for chunk in plan.chunks]


def step(scheduler: Scheduler, token_id: int = 7) -> list[SchedulerOutcome]:
    plan = scheduler.plan()
    assert plan is not None
    return scheduler.commit(
        plan, [Computed(tuple(Drawn(token_id, -0.5) for _ in chunk.samples)) for chunk in plan.chunks]
    )


def fail_step(scheduler: Scheduler) -> list[SchedulerOutcome]:
    plan = scheduler.plan()
    assert plan is not None
    return scheduler.commit(plan, [NonFinite() for _ in plan.chunks])


def test_a_long_prompt_is_computed_in_chunks(scheduler):
    scheduler.add(prompt(1, 18))
    seen = []
    while scheduler.has_work:
        seen.extend(spans(scheduler.plan()))
        step(scheduler)
    assert seen == [(1, 0, 8), (1, 8, 16), (1, 16, 18)]


def test_the_last_step_of_a_long_prompt_is_short_and_begins_with_a_block():
    scheduler = prefill_scheduler(BlockPool(8), BLOCK, chunk_tokens=8, tail_tokens=3)
    scheduler.add(prompt(1, 22))
    scheduler.add(private_prompt(2, 6))
    seen = []
    while scheduler.has_work:
        seen.append(spans(scheduler.plan()))
        step(scheduler)
    assert seen == [[(1, 0, 8)], [(1, 8, 16)], [(1, 16, 20), (2, 0, 4)], [(1, 20, 22), (2, 4, 6)]]
    scheduler.abort(1)
    scheduler.abort(2)
    scheduler.pool.check_conservation()


@pytest.mark.parametrize(
    ("length", "tail_tokens", "steps"),
    [
        (19, 3, [(1, 0, 8), (1, 8, 16), (1, 16, 19)]),  # no more than the tail is left
        (24, 5, [(1, 0, 8), (1, 8, 16), (1, 16, 20), (1, 20, 24)]),  # what is left would just fit
        (24, 8, [(1, 0, 8), (1, 8, 16), (1, 16, 24)]),
    ],
)
def test_tail_of_a_prompt_is_split_off_where_more_is_left_and_fits(length, tail_tokens, steps):
    scheduler = prefill_scheduler(BlockPool(8), BLOCK, chunk_tokens=8, tail_tokens=tail_tokens)
    scheduler.add(prompt(1, length))
    for expected in steps:
        assert spans(scheduler.plan()) == [expected]
        step(scheduler)
    assert not scheduler.has_work
    scheduler.abort(1)


def test_a_prompt_of_one_step_has_no_step_for_its_tail():
    """Nor has one whose first blocks are cached: nothing of it is transferred meanwhile."""
    scheduler = prefill_scheduler(BlockPool(8), BLOCK, chunk_tokens=8, tail_tokens=4)
    for request_id, length, span in ((1, 8, (0, 8)), (2, 16, (8, 16))):
        scheduler.add(prompt(request_id, length))
        assert spans(scheduler.plan()) == [(request_id, *span)]
        step(scheduler)
        scheduler.abort(request_id)


def test_only_the_last_chunk_draws_and_once_per_choice(scheduler):
    scheduler.add(prompt(1, 10, n=3))
    assert scheduler.plan().chunks[0].samples == ()
    [progress] = step(scheduler)
    assert progress.first is None
    assert [sample.choice for sample in scheduler.plan().chunks[0].samples] == [0, 1, 2]
    [progress] = step(scheduler)
    assert [(token.choice, token.token_id, token.end) for token in progress.first] == [
        (0, 7, None),
        (1, 7, None),
        (2, 7, None),
    ]


def test_short_prompts_share_a_step_within_its_budget(scheduler):
    for request_id in (1, 2, 3):
        scheduler.add(prompt(request_id, 3))
    assert spans(scheduler.plan()) == [(1, 0, 3), (2, 0, 3), (3, 0, 2)]


def test_an_older_prompt_is_finished_first(scheduler):
    scheduler.add(prompt(1, 10))
    scheduler.add(prompt(2, 3))
    assert spans(scheduler.plan()) == [(1, 0, 8)]
    step(scheduler)
    assert spans(scheduler.plan()) == [(1, 8, 10), (2, 0, 3)]


def test_a_computed_prompt_is_pinned_until_it_is_aborted(scheduler):
    scheduler.add(prompt(1, 6))
    step(scheduler)
    assert not scheduler.has_work
    assert (scheduler.batch.held_by_sequences, scheduler.batch.held_by_transfers) == (0, 2)
    scheduler.abort(1)
    assert scheduler.pool.counts == BlockCounts(total=8, free=7, cached=1, held=0)


def test_cached_blocks_are_skipped(scheduler):
    scheduler.add(prompt(1, 8))
    step(scheduler)
    scheduler.abort(1)
    scheduler.add(prompt(2, 11))
    assert spans(scheduler.plan()) == [(2, 8, 11)]
    [progress] = step(scheduler)
    assert (progress.cached_tokens, progress.computed_tokens) == (8, 11)
    assert progress.new_blocks == (0, 1, 2), "cached blocks are readable at once"


def test_the_block_of_the_last_prompt_token_is_always_computed(scheduler):
    scheduler.add(prompt(1, 8))
    step(scheduler)
    scheduler.add(prompt(2, 8))
    assert spans(scheduler.plan()) == [(2, 4, 8)]


def test_a_pinned_prefix_is_shared_and_counted_as_computed(scheduler):
    scheduler.add(prompt(1, 8))
    step(scheduler)
    scheduler.add(prompt(2, 20))
    step(scheduler)
    assert scheduler.pool.counts.held == 4
    assert (scheduler.batch.held_by_sequences, scheduler.batch.held_by_transfers) == (4, 0)
    scheduler.abort(2)
    assert (scheduler.batch.held_by_sequences, scheduler.batch.held_by_transfers) == (0, 2)


def test_nothing_is_published_before_the_prompt_is_complete(scheduler):
    scheduler.add(prompt(1, 12))
    step(scheduler)
    assert scheduler.abort(1)
    assert scheduler.pool.counts == BlockCounts(total=8, free=8, cached=0, held=0)


def test_a_non_finite_prompt_is_forgotten_and_not_published(scheduler):
    scheduler.add(prompt(1, 8))
    [progress] = fail_step(scheduler)
    assert progress == RequestFailed(1)
    assert scheduler.pool.counts == BlockCounts(total=8, free=8, cached=0, held=0)
    assert not scheduler.abort(1)


def test_cached_blocks_that_a_non_finite_prompt_has_read_are_not_found_again(scheduler):
    scheduler.add(prompt(1, 9))
    while scheduler.plan() is not None:
        step(scheduler)
    scheduler.abort(1)
    assert scheduler.pool.counts.cached == 2
    scheduler.add(prompt(2, 9))
    plan = scheduler.plan()
    assert plan.chunks[0].start == 8
    scheduler.commit(plan, [NonFinite(kv_suspect=True)])
    assert scheduler.pool.counts == BlockCounts(total=8, free=8, cached=0, held=0)


def test_a_prompt_waits_until_there_is_room_for_all_of_it(scheduler):
    scheduler.add(private_prompt(1, 20))
    scheduler.add(private_prompt(2, 16))
    while scheduler.plan() is not None:
        step(scheduler)
    assert (len(scheduler.batch.waiting), scheduler.pool.counts.held) == (1, 5)
    scheduler.abort(1)
    assert scheduler.plan() is not None


def test_a_short_prompt_does_not_overtake_one_that_waits_for_room(scheduler):
    for request_id, length in ((1, 20), (2, 32), (3, 1)):
        scheduler.add(private_prompt(request_id, length))
    while scheduler.plan() is not None:
        step(scheduler)
    assert len(scheduler.batch.waiting) == 2


def test_load_is_counted_in_tokens(scheduler):
    def load():
        return scheduler.batch.pending_tokens, len(scheduler.batch.waiting), scheduler.batch.running_sequences

    scheduler.add(prompt(1, 10))
    scheduler.add(prompt(2, 5))
    assert load() == (15, 2, 0)
    step(scheduler)
    assert load() == (7, 1, 1)


@pytest.mark.parametrize(
    ("token_id", "max_tokens", "end"), [(STOP, 1, EndReason.STOP), (7, 1, EndReason.LENGTH), (7, 2, None)]
)
def test_the_first_token_may_end_the_answer(scheduler, token_id, max_tokens, end):
    scheduler.add(prompt(1, 3, max_tokens=max_tokens))
    [progress] = step(scheduler, token_id)
    assert progress.first[0].end is end


def test_malformed_requests_are_refused(scheduler):
    whole = prompt(1, 8)
    scheduler.add(whole)
    with pytest.raises(RequestRefused, match="already exists"):
        scheduler.add(whole)
    with pytest.raises(RequestRefused, match="no tokens"):
        scheduler.add(prompt(2, 0))
    with pytest.raises(RequestRefused, match="block hashes"):
        scheduler.add(prefill_request(2, whole.token_ids, whole.params, whole.block_hashes[:1]))
    with pytest.raises(RequestRefused, match="at least 1"):
        scheduler.add(prompt(2, 8, n=0))
    assert len(scheduler.batch.waiting) == 1


def test_a_prompt_without_hashes_stays_out_of_the_cache(scheduler):
    for request_id in (1, 2):
        scheduler.add(private_prompt(request_id, 8))
        assert spans(scheduler.plan()) == [(request_id, 0, 8)]
        step(scheduler)
        scheduler.abort(request_id)
    assert scheduler.pool.counts == BlockCounts(total=8, free=8, cached=0, held=0)
