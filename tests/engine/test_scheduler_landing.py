"""Prompts whose KV comes from elsewhere: reserving, landing, one token per choice and step, and leaving."""

import pytest

from baton.engine.kv_cache.block_pool import BlockCounts, BlockPool
from baton.engine.kv_cache.swap_space import SwapSpace
from baton.engine.request import Computed, Drawn, EndReason, FirstToken, Request, RequestRefused, UnknownRequest
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import SchedulerOutcome
from baton.text.block_hash import root_hash

BLOCK = 4
STOP = 99
ROOT = root_hash(b"model", "float32")


def request(request_id: int, length: int, max_tokens: int, n: int = 1) -> Request:
    """A prompt whose tokens are its positions, so that all prompts share their prefix."""
    hashes = tuple(b"block %d" % index for index in range(length // BLOCK))
    params = SamplingParams(max_tokens=max_tokens, n=n, stop_token_ids=frozenset({STOP}))
    return Request(request_id, tuple(range(length)), params, hashes)


def first(n: int = 1, token_id: int = 50) -> list[FirstToken]:
    return [FirstToken(choice, token_id + choice, -0.5, end=None) for choice in range(n)]


@pytest.fixture
def scheduler():
    scheduler = Scheduler(BlockPool(8), BLOCK, max_step_tokens=16, max_sequences=4)
    yield scheduler
    scheduler.pool.check_conservation()


def start(scheduler: Scheduler, length: int, max_tokens: int, n: int = 1, request_id: int = 1) -> None:
    assert scheduler.reserve(request(request_id, length, max_tokens, n)) is not None
    scheduler.activate(request_id, first(n))


def step(scheduler: Scheduler, token_id: int = 7) -> list[SchedulerOutcome]:
    plan = scheduler.plan()
    assert plan is not None
    return scheduler.commit(plan, [Computed((Drawn(token_id, -0.5),)) for _ in plan.chunks])


def test_a_reservation_covers_the_prompt_and_takes_one_block_more(scheduler):
    reservation = scheduler.reserve(request(1, 6, 10))
    assert reservation.blocks == (0, 1)
    assert reservation.cached_blocks == 0
    assert scheduler.pool.counts.held == 3
    assert (scheduler.batch.held_by_sequences, scheduler.batch.held_by_transfers) == (0, 3)


def test_a_reservation_takes_no_block_that_can_never_be_written(scheduler):
    scheduler.reserve(request(1, 6, 3))  # the last token's KV is never needed
    assert scheduler.pool.counts.held == 2


def test_an_answer_s_complete_blocks_are_in_the_cache_too(scheduler):
    prompt = tuple(range(6))
    assert scheduler.reserve(Request(1, prompt, SamplingParams(max_tokens=8), ()), ROOT) is not None
    scheduler.activate(1, first())
    while scheduler.has_work:
        step(scheduler)
    second = (*prompt, 50, *[7] * 7, 1, 2, 3)  # the second turn of the conversation
    reservation = scheduler.reserve(Request(2, second, SamplingParams(max_tokens=8), ()), ROOT)
    assert reservation.cached_blocks == 3  # 13 tokens of the first turn have KV


def test_a_cached_prompt_is_not_transferred_again_but_for_its_last_block(scheduler):
    start(scheduler, length=8, max_tokens=4)
    step(scheduler, token_id=STOP)
    reservation = scheduler.reserve(request(2, 8, 4))
    assert (reservation.blocks[0], reservation.cached_blocks) == (0, 1)
    assert (scheduler.counters.cache_query_tokens, scheduler.counters.cache_hit_tokens) == (16, 4)


def test_blocks_are_published_only_once_they_have_landed(scheduler):
    scheduler.reserve(request(1, 9, 4))
    assert scheduler.reserve(request(2, 9, 4)).cached_blocks == 0
    scheduler.activate(1, first())
    scheduler.abort(2)
    assert scheduler.reserve(request(3, 9, 4)).cached_blocks == 2


def test_admission_counts_what_is_needed_now_and_leaves_room_to_grow(scheduler):
    start(scheduler, length=4, max_tokens=16)  # 2 blocks now, 5 at its longest; its first is in the cache
    assert scheduler.reserve(request(2, 24, 8)) is None, "6 and 1 to go on, and 1 for who runs to grow into"
    assert scheduler.reserve(request(3, 20, 12)) is not None, "5 and 1, and 1"


def test_who_waits_has_a_claim_before_any_reservation(scheduler):
    start(scheduler, length=12, max_tokens=2, request_id=1)
    scheduler.add(request(2, 15, 4))
    assert scheduler.reserve(request(3, 1, 2)) is None, "the prompt that waits is to have those blocks"
    assert step(scheduler)[0].end is EndReason.LENGTH
    scheduler.abort(2)
    assert scheduler.reserve(request(3, 1, 2)) is not None


def test_slots_are_counted_per_choice(scheduler):
    assert scheduler.reserve(request(1, 1, 2, n=3)) is not None
    assert scheduler.reserve(request(2, 1, 2, n=2)) is None
    assert scheduler.reserve(request(3, 1, 2, n=1)) is not None


def test_a_request_is_known_once(scheduler):
    start(scheduler, length=4, max_tokens=4)
    with pytest.raises(RequestRefused, match="already exists"):
        scheduler.reserve(request(1, 4, 4))


def test_activation_needs_a_reservation_and_every_first_token(scheduler):
    with pytest.raises(UnknownRequest):
        scheduler.activate(1, first())
    scheduler.reserve(request(1, 4, 4, n=2))
    with pytest.raises(ValueError, match="2 choices"):
        scheduler.activate(1, first(n=1))
    scheduler.activate(1, first(n=2))


def test_held_blocks_are_split_by_owner(scheduler):
    start(scheduler, length=9, max_tokens=4, request_id=1)
    scheduler.reserve(request(2, 9, 4))  # shares two blocks with the running one
    assert (scheduler.batch.held_by_sequences, scheduler.batch.held_by_transfers) == (3, 1)


def test_a_landed_prompt_runs_beside_one_that_is_computed_here(scheduler):
    start(scheduler, length=6, max_tokens=10)
    scheduler.add(Request(2, tuple(range(50, 60)), SamplingParams(max_tokens=4), ()))
    assert [(chunk.request_id, len(chunk.token_ids)) for chunk in scheduler.plan().chunks] == [(1, 1), (2, 10)]


@pytest.mark.parametrize("host_slots", [0, 8])
def test_even_the_oldest_gives_way_to_a_reservation_until_that_has_landed(host_slots):
    scheduler = Scheduler(BlockPool(5), BLOCK, 16, max_sequences=4, swap=SwapSpace(host_slots))
    start(scheduler, length=4, max_tokens=16)
    landing = Request(2, (9, 9, 9, 9, 9), SamplingParams(max_tokens=1), ())
    assert len(scheduler.reserve(landing).blocks) == 2
    made = []
    while (plan := scheduler.plan()) is not None:
        made += scheduler.commit(plan, [Computed((Drawn(7, -0.5),)) for _ in plan.chunks])
        carried_out = plan.swaps_out if not plan.chunks else ()
    assert len(carried_out) == (3 if host_slots else 0)
    assert (scheduler.counters.preemptions, scheduler.pool.counts.held, len(scheduler.batch.waiting)) == (1, 2, 1)
    scheduler.activate(2, [FirstToken(0, 50, -0.5, EndReason.LENGTH)])
    while scheduler.has_work:
        made += step(scheduler)
    assert [token.offset for token in made] == list(range(1, 16)), "it went on where it was"


def test_a_prompt_that_lands_in_part_leaves_its_complete_blocks_in_the_cache(scheduler):
    prompt = request(1, 18, 4)
    scheduler.reserve(prompt)
    assert scheduler.abort(1, landed_blocks=3)
    assert scheduler.pool.counts == BlockCounts(total=8, free=5, cached=3, held=0)
    assert scheduler.reserve(request(2, 18, 4)).cached_blocks == 3


def test_of_a_prompt_that_lands_in_part_no_block_that_is_part_full_is_kept(scheduler):
    scheduler.reserve(request(1, 18, 4))
    scheduler.abort(1, landed_blocks=5)
    assert scheduler.pool.counts.cached == 4


def test_what_landed_of_a_prompt_without_hashes_is_free(scheduler):
    scheduler.reserve(Request(1, tuple(range(10)), SamplingParams(max_tokens=4), ()))
    scheduler.abort(1, landed_blocks=2)
    assert scheduler.pool.counts.free == 8
