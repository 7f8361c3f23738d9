"""Prompts take blocks as they are computed: none waits for ever, and windows lengthen contexts."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.swap_space import SwapSpace
from baton.engine.request import NO_OBJECTIVES, Chunk, Computed, Drawn, Objectives, Plan, Request, RequestTooLong
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.batch import RunningBatch
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import ScheduledSequence, TokenMade
from baton.text.block_groups import ONE_GROUP, BlockGroups
from baton.text.block_hash import root_hash
from tests.fixtures.objectives import URGENT
from tests.fixtures.scheduler_world import SchedulerWorld

BLOCK = 4
ROOT = root_hash(b"model", "float32")


def request(number: int, tokens: int, max_tokens: int = 1, prefill_only: bool = False, urgent: bool = False) -> Request:
    return Request(
        number,
        tuple(range(100 * number, 100 * number + tokens)),
        SamplingParams(max_tokens=max_tokens),
        (),
        prefill_only=prefill_only,
        objectives=URGENT if urgent else NO_OBJECTIVES,
    )


def step(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """Compute a step; return request, first position and number of tokens of its chunks."""
    plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(plan, [Computed(tuple(Drawn(7, 0.0) for _ in chunk.samples)) for chunk in plan.chunks])
    return spans(plan)


def chunks_at(scheduler: Scheduler, now_s: float) -> Sequence[Chunk]:
    plan = scheduler.plan(now_s)
    assert plan is not None
    return plan.chunks


def spans(plan: Plan) -> list[tuple[int, int, int]]:
    return [(chunk.request_id, chunk.start, len(chunk.token_ids)) for chunk in plan.chunks]


def scheduler_of(blocks: int, step_tokens: int = 8, groups: BlockGroups = ONE_GROUP, **options: int) -> Scheduler:
    return Scheduler(BlockPool(blocks, groups), BLOCK, step_tokens, max_sequences=4, **options)


@pytest.mark.parametrize("prefill_only", [False, True])
def test_running_prompt_holds_the_blocks_of_its_computed_tokens(prefill_only: bool) -> None:
    scheduler = scheduler_of(blocks=8)
    scheduler.add(request(1, 30, prefill_only=prefill_only))
    for held in (2, 4, 6):
        step(scheduler)
        assert scheduler.pool.counts.held == held


def test_urgent_prompt_takes_blocks_that_a_long_prompt_needs_later() -> None:
    scheduler = scheduler_of(blocks=8)
    scheduler.add(request(1, 32, prefill_only=True))
    step(scheduler)
    scheduler.add(request(2, 12, prefill_only=True, urgent=True))
    assert [step(scheduler), step(scheduler)] == [[(2, 0, 8)], [(2, 8, 4)]]
    assert scheduler.plan() is None, "the long prompt waits for the reader of the short one"
    scheduler.abort(2)
    assert [step(scheduler)[0][1] for _ in range(3)] == [8, 16, 24]


def test_answer_is_admitted_if_an_older_prompt_finds_its_blocks_while_it_runs() -> None:
    for answer_tokens, admitted in ((2, False), (1, True)):  # two steps of the prompt take 4 blocks, one takes 2
        scheduler = scheduler_of(blocks=10, answer_tokens=answer_tokens)
        scheduler.add(request(1, 36))
        step(scheduler)
        scheduler.add(request(2, 16, urgent=True))  # 8 blocks are free; one is left for the first answer
        assert ((2, 0, 8) in step(scheduler)) is admitted


def test_waiting_reservation_leaves_running_prompts_their_blocks() -> None:
    scheduler = scheduler_of(blocks=10)
    scheduler.add(request(1, 32))
    step(scheduler)
    assert scheduler.reserve(request(2, 5)) is None, "6 of 8 free blocks are for the prompt, and one for its answer"
    assert scheduler.reserve(request(3, 4)) is not None


def test_prompt_takes_a_column_kept_for_growth_before_another_sequence_is_preempted() -> None:
    scheduler = scheduler_of(blocks=9, answer_tokens=0)
    scheduler.add(request(1, 32))
    step(scheduler)
    scheduler.add(request(2, 24, urgent=True))
    step(scheduler)
    scheduler.pool.allocate(scheduler.pool.available - 1)
    assert step(scheduler) == [(1, 8, 4)]
    assert scheduler.counters.preemptions == 0


def test_younger_answers_release_blocks_for_the_oldest_prompt() -> None:
    scheduler = scheduler_of(blocks=8, answer_tokens=0)
    scheduler.add(request(1, 32))
    step(scheduler)
    for number in (2, 3):
        scheduler.add(request(number, 3, max_tokens=14, urgent=True))
    planned = []
    while scheduler.has_work:
        planned.append(step(scheduler))
    starts = [start for chunks in planned for number, start, _ in chunks if number == 1]
    assert starts[-1] > 16, "it was computed on while answers ran"
    assert scheduler.counters.preemptions > 0
    gaps = [index for index, chunks in enumerate(planned) if any(number == 1 for number, _, _ in chunks)]
    assert max(after - before for before, after in itertools.pairwise(gaps)) <= 3


def test_younger_prompt_releases_blocks_for_an_older_one_while_a_transfer_holds_the_rest() -> None:
    scheduler = scheduler_of(blocks=10, step_tokens=4, answer_tokens=0)
    scheduler.add(request(1, 16))
    step(scheduler)
    scheduler.add(replace(request(2, 16), objectives=Objectives(first_token_at_s=1.0, ttft_s=1.0)))
    assert step(scheduler) == [(2, 0, 4)]
    assert scheduler.reserve(request(3, 28)) is not None
    scheduler.pool.allocate(scheduler.pool.available)
    assert [chunk.request_id for chunk in chunks_at(scheduler, 5.0)] == [1], "now that the other is late"
    assert [each.request.request_id for each in scheduler.batch.waiting] == [2]


def test_prompt_without_enough_blocks_lets_no_other_be_admitted() -> None:
    scheduler = scheduler_of(blocks=8)
    scheduler.add(request(1, 32, prefill_only=True))
    step(scheduler)
    scheduler.add(request(2, 4, prefill_only=True, urgent=True))
    assert step(scheduler) == [(2, 0, 4)]
    scheduler.add(request(3, 4, prefill_only=True))
    assert scheduler.plan() is None
    scheduler.abort(2)
    assert step(scheduler) == [(1, 8, 8)]


class Offers:
    """Prompts for another worker, whose next column is offered in any order."""

    def __init__(self, blocks: int, columns: Sequence[int]) -> None:
        self.batch = RunningBatch(BlockPool(blocks), BLOCK, SwapSpace(0))
        self.prompts = [
            self.batch.make(request(number, BLOCK * count, prefill_only=True), None)
            for number, count in enumerate(columns)
        ]
        for prompt in self.prompts:
            self.batch.wait(prompt)

    @property
    def state(self) -> tuple[int | None, ...]:
        """Columns of each prompt; None if it is complete and its blocks are released."""
        return tuple(self._columns(prompt) for prompt in self.prompts)

    def offer(self, number: int) -> None:
        """Admit a prompt, or compute its next column, or release it after its last."""
        prompt, batch = self.prompts[number], self.batch
        if prompt in batch.waiting:
            batch.admit(prompt, most_slots=0)
        elif prompt in batch.running:
            prompt.computed_tokens += batch.grow(prompt, BLOCK, is_favoured=False)
            if not prompt.uncomputed_tokens:
                batch.end(prompt)

    def _columns(self, prompt: ScheduledSequence) -> int | None:
        if prompt in self.batch.waiting:
            return -1
        return prompt.held().columns if prompt in self.batch.running else None


def stuck_states(blocks: int, columns: Sequence[int]) -> Iterator[tuple[int | None, ...]]:
    """Explore every order of offers; yield the states in which no prompt can take a block."""
    paths: dict[tuple[int | None, ...], tuple[int, ...]] = {Offers(blocks, columns).state: ()}
    for state in (queue := list(paths)):
        moved = False
        for number in range(len(columns)):
            offers = Offers(blocks, columns)
            for each in (*paths[state], number):
                offers.offer(each)
            moved |= offers.state != state
            if offers.state not in paths:
                paths[offers.state] = (*paths[state], number)
                queue.append(offers.state)
        if not moved and any(each is not None for each in state):
            yield state


@pytest.mark.parametrize(("blocks", "columns"), [(4, (4, 4)), (5, (4, 3, 2)), (6, (6, 5, 3))])
def test_prompts_that_cannot_be_preempted_never_all_wait_in_any_order(blocks: int, columns: Sequence[int]) -> None:
    assert list(stuck_states(blocks, columns)) == []
    with patch.object(RunningBatch, "lacking_blocks", lambda self, sequence: 0):
        assert list(stuck_states(blocks, columns)), "without the rule, some wait for each other"


def test_prompts_that_share_cached_windows_never_all_wait() -> None:
    """A block in the window of both becomes available only after both have passed it."""
    groups = BlockGroups(1, 5, window_tokens=4 * BLOCK, block_tokens=BLOCK)
    scheduler = scheduler_of(blocks=56, step_tokens=BLOCK, groups=groups)
    prefix = request(0, 10 * BLOCK).token_ids
    scheduler.add(Request(0, (*prefix, 7), SamplingParams(max_tokens=1), ()), ROOT)
    while scheduler.has_work:
        step(scheduler)
    for number in (1, 2):
        asked = request(number, 10 * BLOCK, prefill_only=True, urgent=number == 2)
        scheduler.add(replace(asked, token_ids=(*prefix, *asked.token_ids)), ROOT)
        step(scheduler)
    ended = set()
    while len(ended) < 2:
        ended |= {number for number, start, count in step(scheduler) if start + count == 20 * BLOCK}
        for number in ended & scheduler.batch.requests.keys():
            scheduler.abort(number)


def test_windows_make_a_context_servable_that_is_longer_than_the_pool() -> None:
    groups = BlockGroups(1, 2, window_tokens=3, block_tokens=2)
    world = SchedulerWorld(blocks=24, host_slots=0, groups=groups)  # 8 columns with all their blocks
    world.add(tuple(range(1, 29)), max_tokens=4, n=1, cached=True)  # 16 columns
    world.compute(tuple(range(30, 60)), n=1, cached=False)
    assert len(world.here) == 2
    world.finish()


def test_prompt_that_windows_cannot_shorten_enough_is_refused() -> None:
    scheduler = scheduler_of(blocks=17, groups=BlockGroups(1, 2, window_tokens=4, block_tokens=BLOCK))
    scheduler.add(request(1, 44))  # 11 blocks without a window; a window, and 2 columns more, of the others
    with pytest.raises(RequestTooLong, match="18 blocks; the pool has 17"):
        scheduler.add(request(2, 48))


@pytest.mark.parametrize("host_slots", [0, 24])
def test_preempted_prompt_longer_than_the_pool_continues(host_slots: int) -> None:
    groups = BlockGroups(1, 2, window_tokens=3, block_tokens=2)
    world = SchedulerWorld(blocks=24, host_slots=host_slots, groups=groups, step_tokens=4)
    world.add(tuple(range(1, 29)), max_tokens=4, n=1, cached=False)
    for _ in range(4):
        world.step()
    [prompt] = world.scheduler.batch.running
    swaps = world.scheduler.batch.preempt(prompt)
    assert len(swaps) == (8 + 2 * 2 if host_slots else 0), "no block that a window has passed"
    for swap in swaps:
        world.host[swap.host_slot] = world.layers[swap.block], list(world.memory[swap.block])
    world.finish()


@pytest.mark.parametrize(("blocks", "cached_tokens"), [(60, 24), (18, 0)])
def test_blocks_that_windows_have_passed_are_cached_if_there_was_room(blocks: int, cached_tokens: int) -> None:
    scheduler = scheduler_of(blocks, groups=BlockGroups(1, 2, window_tokens=4, block_tokens=BLOCK))
    token_ids = request(1, 48).token_ids
    for number, tokens in ((1, token_ids), (2, (*token_ids[:25], 7))):
        scheduler.add(Request(number, tokens, SamplingParams(max_tokens=1), ()), ROOT)
        plan = scheduler.plan()
        while plan is not None:
            computed = [Computed(tuple(Drawn(7, 0.0) for _ in chunk.samples)) for chunk in plan.chunks]
            outcome = scheduler.commit(plan, computed)[-1]
            plan = scheduler.plan()
    assert isinstance(outcome, TokenMade)
    assert outcome.cached_tokens == cached_tokens
