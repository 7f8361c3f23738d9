"""One line of a policy changed (who goes first, when, how often): the test beside it notices.

A mutation whose line is gone fails: it must be moved to what has taken the place of that line.
"""

import asyncio
from dataclasses import dataclass
from inspect import iscoroutinefunction
from types import ModuleType

import pytest

from tests.fixtures.mutants import Mutation, last_of


@dataclass(frozen=True)
class Policy:
    """A module, those that stand between it and its tests, and the module of its tests."""

    module: str
    tests: str
    between: tuple[str, ...] = ()

    def loaded(self, mutation: Mutation | None) -> ModuleType:
        return last_of([f"baton.{self.module}", *self.between, self.tests], mutation)


EVICTION = Policy("engine.kv_cache.eviction", "tests.engine.test_eviction", ("baton.engine.kv_cache.block_pool",))
BUDGET = Policy("engine.scheduler.budget", "tests.engine.test_step_budget")
SESSIONS = Policy("engine.kv_cache.sessions", "tests.engine.test_sessions")
HUB = Policy("process.links.hub", "tests.process.test_link_hub")
QUEUE = Policy("router.admission.fair_queue", "tests.router.test_fair_queue")
QUARANTINE = Policy("router.request.retry", "tests.router.test_replay")
REPLICAS = Policy("router.placement.replicas", "tests.router.test_replicas")
COSTS = Policy("router.placement.policies", "tests.router.test_placement_costs", ("baton.router.placement.decide",))
AT_REST = Policy("worker.at_rest.checker", "tests.worker.at_rest.test_rest_checker")

MUTATIONS = [
    (
        EVICTION,
        "else self._others\n        for",
        "else self._done\n        for",
        "blocks_of_a_lapsed_session_go_by_their_last_use",
    ),
    (EVICTION, "block in self._loaded or ", "", "blocks_loaded_for_a_prompt_are_evicted_after_session_blocks"),
    (SESSIONS, "self._sessions.move_to_end(turn.session_id)", "pass", "reused_session_is_not_the_forgotten_one"),
    (
        BUDGET,
        "self._own.in_doubt or not (measured",
        "not (measured",
        "step_after_an_odd_measurement_is_measured_again_before_any_prompt_token",
    ),
    (
        HUB,
        "link.expiry.cancel()\n            link.expiry = None",
        "link.expiry = None",
        "session_resumed_within_its_grace_outlives_that_grace",
    ),
    (
        QUEUE,
        "max(self._clock, self._left.get(name, 0.0))",
        "self._clock",
        "tenant_that_was_served_last_does_not_win_by_leaving",
    ),
    (
        QUEUE,
        "min(others, key=lambda each: each.oldest)",
        "max(others, key=lambda each: each.oldest)",
        "spare_share_goes_to_the_class_whose_oldest_request_waits_longest",
    ),
    (
        QUARANTINE,
        "self.until_s.pop(found, None)",
        "pass",
        "full_quarantine_forgets_the_request_that_was_added_longest_ago",
    ),
    (REPLICAS, "fewer * (1 - SPARE)", "fewer", "replicas_fall_by_one_where_the_most_that_was_wanted_leaves_room"),
    (
        COSTS,
        "_reuse_premium(workers) - 1.0, MAX_AFFINITY_MS + min(waits)",
        "_reuse_premium(workers) - 1.0, MAX_AFFINITY_MS",
        "prompt_computed_again_costs_a_premium_that_the_shortest_wait_bounds",
    ),
    (
        AT_REST,
        "not watch.broken and not self._known",
        "not self._known",
        "block_given_away_while_it_is_summed_raises_no_alarm",
    ),
]


def run(module: ModuleType, test: str) -> None:
    function = getattr(module, f"test_{test}")
    if iscoroutinefunction(function):
        asyncio.run(function())
    else:
        function()


@pytest.mark.parametrize(("policy", "old", "new", "test"), MUTATIONS, ids=[each[-1] for each in MUTATIONS])
def test_policy_with_one_line_changed_fails_its_test(policy: Policy, old: str, new: str, test: str) -> None:
    run(policy.loaded(None), test)
    changed = policy.loaded(Mutation(policy.module, old, new))
    with pytest.raises(AssertionError):
        run(changed, test)
