"""Mixed batches, step by step: who computes what, who shares, who gives way."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.request import (
    BlockSwap,
    Computed,
    Drawn,
    EndReason,
    NonFinite,
    Plan,
    Request,
    RequestRefused,
    RequestTooLong,
)
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.budget import StepBudget
from baton.engine.scheduler.scheduler import LANDING_DIVISOR, Scheduler
from baton.engine.scheduler.sequences import PromptComputed, RequestFailed, SchedulerOutcome, TokenMade
from baton.text.block_hash import HashChain, root_hash
from tests.fixtures.objectives import URGENT

ROOT = root_hash(b"model", "float32")
BLOCK = 4
Maker = Callable[..., Scheduler]


@pytest.fixture
def make() -> Iterator[Maker]:
    made: list[Scheduler] = []

    def maker(blocks: int = 16, step_tokens: int = 8, sequences: int = 4, target_s: float | None = None) -> Scheduler:
        budget = None if target_s is None else StepBudget()
        made.append(Scheduler(BlockPool(blocks), BLOCK, step_tokens, sequences, budget, tbt_s=target_s or 0.0))
        return made[-1]

    yield maker
    for scheduler in made:
        scheduler.pool.check_conservation()


def request(number: int, tokens: int, max_tokens: int = 4, n: int = 1, first: int = 1) -> Request:
    params = SamplingParams(max_tokens=max_tokens, n=n)
    return Request(number, tuple(range(first, first + tokens)), params, ())


def step(scheduler: Scheduler, *, failed: int | None = None) -> tuple[Plan, list[SchedulerOutcome]]:
    """One step of a model that draws 100 * request + the position of the drawn token."""
    plan = scheduler.plan()
    assert plan is not None
    return plan, commit(scheduler, plan, failed=failed)


def commit(scheduler: Scheduler, plan: Plan, *, failed: int | None = None) -> list[SchedulerOutcome]:
    results = [
        NonFinite()
        if chunk.request_id == failed
        else Computed(tuple(Drawn(100 * chunk.request_id + chunk.end, 0.0) for _ in chunk.samples))
        for chunk in plan.chunks
    ]
    return scheduler.commit(plan, results)


def run(scheduler: Scheduler) -> list[TokenMade]:
    made: list[TokenMade] = []
    while scheduler.has_work:
        made += [outcome for outcome in step(scheduler)[1] if isinstance(outcome, TokenMade)]
    return made


def shape(plan: Plan) -> list[tuple[int, int, int]]:
    return [(chunk.request_id, chunk.start, len(chunk.token_ids)) for chunk in plan.chunks]


def is_cached(scheduler: Scheduler, asked: Request) -> bool:
    return scheduler.pool.is_named(HashChain(ROOT, BLOCK, ()).first(1, asked.token_ids)[0])


def test_decode_tokens_come_first_and_prompts_fill_the_step(make: Maker) -> None:
    scheduler = make(step_tokens=8)
    scheduler.add(request(1, 5))
    scheduler.add(request(2, 10))
    assert shape(step(scheduler)[0]) == [(1, 0, 5), (2, 0, 3)]
    assert shape(step(scheduler)[0]) == [(1, 5, 1), (2, 3, 7)]
    assert shape(step(scheduler)[0]) == [(1, 6, 1), (2, 10, 1)]


def test_an_answer_has_its_tokens_in_order_and_ends(make: Maker) -> None:
    scheduler = make()
    scheduler.add(request(1, 5, max_tokens=3))
    made = run(scheduler)
    assert [(token.offset, token.drawn.token_id, token.end) for token in made] == [
        (0, 105, None),
        (1, 106, None),
        (2, 107, EndReason.LENGTH),
    ]
    assert scheduler.pool.counts.held == 0


def test_steps_planned_ahead_have_each_position_of_each_answer_once(make: Maker) -> None:
    scheduler, planned, arrivals = make(step_tokens=16), list[Plan](), {2: 3}
    for number, max_tokens in ((1, 4), (2, 9)):
        scheduler.add(request(number, 5, max_tokens))
    plan = scheduler.plan()
    while plan is not None:
        planned.append(plan)
        ahead = scheduler.plan_ahead()
        commit(scheduler, plan)
        if number := arrivals.pop(len(planned), None):
            scheduler.add(request(number, 5, 4, first=50))
        plan = ahead or scheduler.plan()
    chunks = [chunk for plan in planned for chunk in plan.chunks]
    starts = {number: [chunk.start for chunk in chunks if chunk.request_id == number] for number in (1, 2, 3)}
    assert starts == {1: [0, *range(5, 8)], 2: [0, *range(5, 13)], 3: [0, *range(5, 8)]}


def test_step_planned_ahead_leaves_out_an_aborted_answer(make: Maker) -> None:
    scheduler = make(step_tokens=16)
    for number in (1, 2):
        scheduler.add(request(number, 5, max_tokens=20))
    step(scheduler)
    plan = scheduler.plan()
    for _ in range(3):
        assert plan is not None
        ahead = scheduler.plan_ahead()
        commit(scheduler, plan)
        plan = ahead
    scheduler.abort(1)
    last = scheduler.plan_ahead()
    assert last is not None and [chunk.request_id for chunk in last.chunks] == [2]


def test_a_prompt_shrinks_to_what_answers_can_wait_for(make: Maker) -> None:
    scheduler = make(blocks=512, step_tokens=100, target_s=0.040)
    scheduler.add(replace(request(1, 90, max_tokens=100), objectives=URGENT))
    scheduler.add(replace(request(2, 90, max_tokens=100, first=1000), objectives=URGENT))
    sizes: list[int] = []
    for number in range(3, 80):
        scheduler.add(replace(request(number, 90, max_tokens=1, first=1000 * number), objectives=URGENT))
        plan, _ = step(scheduler)
        sizes.append(plan.prompt_tokens)
        scheduler.observe(plan, 0.010 + 0.001 * plan.prompt_tokens)
    assert sizes[0] == 100, "nobody waits between two tokens yet"
    assert sizes[1] == 0, "how long answers take by themselves is measured"
    assert 20 <= max(sizes[-8:]) <= 30


def test_steps_of_prompts_are_small_while_an_answer_is_on_its_way(make: Maker) -> None:
    scheduler = make(blocks=32, step_tokens=32, target_s=0.1)
    scheduler.add(request(1, 40))
    assert scheduler.reserve(request(2, 4)) is not None
    assert step(scheduler)[0].tokens == 32 // LANDING_DIVISOR
    scheduler.abort(2)
    assert step(scheduler)[0].tokens == 32


def test_blocks_that_a_queued_prompt_needs_outlive_blocks_used_later(make: Maker) -> None:
    scheduler = make(blocks=4)
    needed, other = request(1, 4, max_tokens=1), request(2, 4, max_tokens=1, first=50)
    for each in (needed, other):
        scheduler.add(each, ROOT)
        run(scheduler)
    scheduler.add(request(3, 6), ROOT)
    scheduler.pool.release(*scheduler.pool.allocate(3)[:1])
    assert is_cached(scheduler, needed) and not is_cached(scheduler, other)


def test_fetched_blocks_wait_for_the_prompt_that_they_were_fetched_for(make: Maker) -> None:
    scheduler = make(blocks=4)
    incoming = scheduler.batch.begin_fetch([b"one", b"two"], lambda lacking: lacking == 2)
    assert incoming is not None
    scheduler.batch.end_fetch(incoming, blocks=2)
    assert scheduler.pool.order.awaited_blocks == 2
    assert scheduler.batch.begin_take_over([b"x", b"y", b"z"]) is None, "they are not spare"
    assert scheduler.batch.begin_fetch([b"one", b"two"], lambda lacking: True) is None, "nothing is lacking"


def test_last_answer_gives_way_to_a_fetch_that_will_end(make: Maker) -> None:
    """It is no fault that it lacks a block: the fetch holds some for a bounded time."""
    scheduler = make(blocks=3)
    scheduler.add(request(1, 8, max_tokens=4))
    step(scheduler)
    incoming = scheduler.batch.begin_fetch([b"fetched"], lambda lacking: True)
    assert incoming is not None
    assert scheduler.plan() is None
    scheduler.batch.end_fetch(incoming, blocks=0)
    assert [made.offset for made in run(scheduler)] == [1, 2, 3]


def test_a_prompt_is_never_starved_by_the_budget(make: Maker) -> None:
    scheduler = make(blocks=64, step_tokens=100, target_s=0.001)
    scheduler.add(request(1, 20, max_tokens=9))
    scheduler.add(request(2, 200))
    for seconds in (0.5, 0.1):
        plan, _ = step(scheduler)
        scheduler.observe(plan, seconds)
    assert shape(step(scheduler)[0])[1] == (2, 80, 1)


def test_a_step_that_moves_blocks_says_nothing_of_others(make: Maker) -> None:
    scheduler = make(blocks=64, step_tokens=100, target_s=0.001)
    scheduler.add(request(1, 20, max_tokens=9))
    scheduler.add(request(2, 200))
    step(scheduler)
    plan, _ = step(scheduler)
    scheduler.observe(replace(plan, swaps_in=(BlockSwap(0, 0),)), 0.1)
    assert step(scheduler)[0].prompt_tokens == 0


def test_choices_share_one_prefill_and_copy_on_write(make: Maker) -> None:
    scheduler = make()
    scheduler.add(request(1, 6, n=3))
    plan, made = step(scheduler)
    assert shape(plan) == [(1, 0, 6)]
    assert [token.choice for token in made if isinstance(token, TokenMade)] == [0, 1, 2]
    assert scheduler.pool.counts.held == 2
    plan, _ = step(scheduler)
    assert len(plan.copies) == 2, "the last choice keeps the block that all shared"
    assert len({chunk.block_table[0] for chunk in plan.chunks}) == 1
    assert len({chunk.block_table[1] for chunk in plan.chunks}) == 3


def test_eight_answers_take_the_prompt_once_and_their_own_tails(make: Maker) -> None:
    scheduler = Scheduler(BlockPool(64), 32, max_step_tokens=512, max_sequences=8)
    scheduler.add(request(1, 512, max_tokens=65, n=8))
    most = 0
    while scheduler.has_work:
        step(scheduler)
        most = max(most, scheduler.pool.counts.held)
    assert most == 512 // 32 + 8 * 2


def test_a_preempted_answer_finds_its_own_blocks_again(make: Maker) -> None:
    scheduler = make(blocks=6, step_tokens=32)
    scheduler.add(request(1, 8, max_tokens=9), ROOT)
    scheduler.add(request(2, 8, max_tokens=12, first=50), ROOT)
    resumed = []
    while scheduler.has_work:
        plan, _ = step(scheduler)
        resumed += [chunk for chunk in plan.chunks if chunk.request_id == 2 and len(chunk.token_ids) > 1]
    assert scheduler.counters.preemptions == 1
    assert [chunk.start for chunk in resumed] == [0, 8], "its first two blocks were still in the cache"


def test_who_gave_way_goes_before_who_never_ran(make: Maker) -> None:
    scheduler = make(blocks=6, step_tokens=32)
    for number in (1, 2, 3):
        scheduler.add(request(number, 8, max_tokens=12, first=50 * number))
    ended = [token.request_id for token in run(scheduler) if token.end is not None]
    assert scheduler.counters.preemptions > 0
    assert ended == [1, 2, 3]


def test_all_choices_of_a_request_are_older_than_the_next_request(make: Maker) -> None:
    scheduler = make(blocks=7, step_tokens=32)
    scheduler.add(request(1, 8, max_tokens=6, n=2))
    scheduler.add(request(2, 7, max_tokens=6, first=50))
    step(scheduler)
    assert len(scheduler.batch.waiting) == 0
    while not scheduler.counters.preemptions:
        plan, _ = step(scheduler)
    assert [chunk.request_id for chunk in plan.chunks] == [1, 1], "request 2 gave way, no choice of request 1"


def test_admission_leaves_room_to_grow(make: Maker) -> None:
    scheduler = make(blocks=7, step_tokens=32)
    scheduler.add(request(1, 8, max_tokens=8))
    scheduler.add(request(2, 16, max_tokens=4, first=50))
    step(scheduler)
    assert len(scheduler.batch.waiting) == 0
    scheduler = make(blocks=6, step_tokens=32)
    scheduler.add(request(1, 8, max_tokens=8))
    scheduler.add(request(2, 16, max_tokens=4, first=50))
    run(scheduler)
    assert scheduler.counters.preemptions == 0, "the second one waited rather than be thrown out at once"


def test_a_second_turn_reuses_the_blocks_of_the_answer(make: Maker) -> None:
    scheduler = make()
    scheduler.add(request(1, 6, max_tokens=7), ROOT)
    answer = tuple(token.drawn.token_id for token in run(scheduler))
    second = Request(2, (1, 2, 3, 4, 5, 6, *answer, 7, 8), SamplingParams(max_tokens=1), ())
    scheduler.add(second, ROOT)
    [token] = run(scheduler)
    assert token.cached_tokens == 12  # of 13 tokens that the first turn had, the last one's KV was never written
    assert (scheduler.counters.cache_query_tokens, scheduler.counters.cache_hit_tokens) == (6 + 15, 12)


def test_another_root_shares_nothing(make: Maker) -> None:
    scheduler = make()
    for number, root in enumerate((ROOT, root_hash(b"model", "float32", cache_salt="other"), None)):
        scheduler.add(request(number, 9, max_tokens=1), root)
        assert [token.cached_tokens for token in run(scheduler)] == [0]


def test_not_finite_logits_end_the_request_and_publish_nothing(make: Maker) -> None:
    scheduler = make(step_tokens=32)
    scheduler.add(request(1, 9, n=2), ROOT)
    scheduler.add(request(2, 9, first=50), ROOT)
    _, outcomes = step(scheduler, failed=1)
    assert outcomes[0] == RequestFailed(1)
    assert outcomes[1] == PromptComputed(2, computed_tokens=9, cached_tokens=0, ended=True)
    assert scheduler.abort(2)
    assert scheduler.pool.counts.cached == 2, "only the neighbour's"


def test_what_can_never_run_is_refused(make: Maker) -> None:
    scheduler = make(blocks=4, sequences=2)
    with pytest.raises(RequestTooLong, match="5 blocks; the pool has 4"):
        scheduler.add(request(1, 10, max_tokens=8))
    with pytest.raises(RequestTooLong, match="3 batch slots; there are 2"):
        scheduler.add(request(1, 4, n=3))
    scheduler.add(request(1, 10, max_tokens=7))
    with pytest.raises(RequestRefused, match="already exists"):
        scheduler.add(request(1, 4))


def test_unfilled_slots_are_those_of_the_last_blocks(make: Maker) -> None:
    scheduler = make(step_tokens=32)
    scheduler.add(request(1, 6))
    scheduler.add(request(2, 8, first=50))
    step(scheduler)
    assert scheduler.batch.unfilled_slots == 2
