"""Random requests on pools of a few blocks: computed here, landed or fetched, preempted, swapped, aborted in any phase.

What is checked stands in tests/fixtures/scheduler_world.py.
"""

import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from baton.text.block_groups import ONE_GROUP, BlockGroups
from tests.fixtures.scheduler_walk import walk
from tests.fixtures.scheduler_world import BLOCK, SchedulerWorld

GROUPS = [
    ONE_GROUP,
    BlockGroups(0, 1, 3, BLOCK),
    BlockGroups(1, 1, 1, BLOCK),
    BlockGroups(2, 3, 5, BLOCK),
    BlockGroups(1, 2, 3, BLOCK),
]
"""All but the first with windows: of one token alone, within a block, and over several."""
answered = st.sampled_from([0, 0, 1, 3])
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)


class MixedLives(RuleBasedStateMachine):
    @initialize(
        columns=st.integers(3, 8),
        host_columns=st.sampled_from([0, 2, 5]),
        slots=st.sampled_from([4, 4, 0]),
        speculates=st.booleans(),
        groups=st.sampled_from(GROUPS),
        tail_tokens=st.sampled_from([0, 3]),
    )
    def begin(self, columns: int, host_columns: int, groups: BlockGroups, **options: Any) -> None:
        self.world = SchedulerWorld(groups.blocks(columns), groups.blocks(host_columns), groups=groups, **options)

    @rule(prompt=prompts, max_tokens=st.integers(1, 8), n=st.integers(1, 3), cached=st.booleans(), answered=answered)
    def add(self, prompt: tuple[int, ...], max_tokens: int, n: int, cached: bool, answered: int) -> None:
        self.world.add(prompt, max_tokens, n, cached, answered)

    @rule(prompt=prompts, max_tokens=st.integers(1, 8), n=st.integers(1, 3), cached=st.booleans(), answered=answered)
    def reserve(self, prompt: tuple[int, ...], max_tokens: int, n: int, cached: bool, answered: int) -> None:
        self.world.reserve(prompt, max_tokens, n, cached, answered)

    @rule(prompt=prompts, n=st.integers(1, 3), cached=st.booleans())
    def compute(self, prompt: tuple[int, ...], n: int, cached: bool) -> None:
        self.world.compute(prompt, n, cached)

    @precondition(lambda self: self.world.reserved)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        self.world.land(data.draw(st.sampled_from(self.world.reserved)))

    @precondition(lambda self: self.world.groups is ONE_GROUP)
    @rule(prompt=prompts)
    def fetch(self, prompt: tuple[int, ...]) -> None:
        self.world.fetch(prompt)

    @precondition(lambda self: self.world.fetches)
    @rule(data=st.data(), valid=st.integers(0, 4))
    def end_fetch(self, data: st.DataObject, valid: int) -> None:
        self.world.end_fetch(data.draw(st.integers(0, len(self.world.fetches) - 1)), valid)

    @rule(fails=st.integers(0, 12), aborts=st.integers(0, 12), ahead=st.booleans(), late=st.booleans())
    def step(self, fails: int, aborts: int, ahead: bool, late: bool) -> None:
        self.world.step(fails, aborts, ahead, late)

    @precondition(lambda self: self.world.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(data.draw(st.integers(1, self.world.asked)))

    @precondition(lambda self: self.world.here)
    @rule(data=st.data(), choice=st.integers(0, 2))
    def stop_choice(self, data: st.DataObject, choice: int) -> None:
        self.world.stop_choice(data.draw(st.sampled_from(sorted(self.world.here))), choice)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


TestMixedLives = MixedLives.TestCase
TestMixedLives.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("groups", [ONE_GROUP, GROUPS[1], GROUPS[-1]], ids=str)
@pytest.mark.parametrize("speculates", [False, True])
@pytest.mark.parametrize("host_slots", [0, 3])
@pytest.mark.parametrize(("columns", "worlds"), [(3, 30), (5, 12), (8, 10)])  # fewer answers of short pools are drafted
def test_thousands_of_operations_lose_nothing(
    columns: int, worlds: int, host_slots: int, speculates: bool, groups: BlockGroups
) -> None:
    draw, blocks = random.Random(100 * columns + host_slots), groups.blocks(columns)
    right = wrong = 0
    for _ in range(worlds):
        world = SchedulerWorld(blocks, host_slots, speculates=speculates, groups=groups)
        walk(world, draw, operations=60)
        world.finish()
        if world.scheduler.speculation is not None:
            counters = world.scheduler.speculation.done
            right += counters.accepted_tokens
            wrong += counters.drafted_tokens - counters.accepted_tokens
    assert (right > 0, wrong > 0) == (speculates, speculates)
