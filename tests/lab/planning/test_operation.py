"""Simulated clusters follow shifts of their load while workers die. A run simulates minutes in seconds."""

import math
from unittest.mock import patch

from baton.lab.planning import planner
from baton.lab.planning.loads import ANSWERS, BALANCED, LOADS, SLOW, SPREAD, steps
from baton.lab.planning.operation import RoleChange, followed_s, reversals, turns
from baton.lab.planning.planner import FIXED, REPLICAS, ROLES, PlannerCase, picture, run_case
from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.planner import AVERAGED, PlannerTiming

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
TIMING = PlannerTiming()
ANSWER_S = (1 + SPREAD) * ANSWERS.answer_tokens * SLOW.step_ms / 1e3  # until slots show a shift to longer answers


def test_role_follows_longer_answers_and_more_requests_meet_the_slos() -> None:
    load = steps((30.0, BALANCED), (150.0, ANSWERS), shifts=((30.0, DECODE),))
    with patch.dict(LOADS, shorter=load):
        (fixed, _), (followed, record) = (run_case(PlannerCase("shorter", mode, 0)) for mode in (FIXED, ROLES))
    assert fixed.changes == 0
    [after_s] = followed.followed_s
    assert after_s <= TIMING.hold_s + AVERAGED * TIMING.cool_down_s + ANSWER_S
    assert {each.to for each in record.changes} == {DECODE}
    assert record.deaths_s and followed.failed == 0
    assert followed.share > fixed.share


def test_replicas_of_both_roles_follow_a_growing_load_without_a_turn() -> None:
    load = steps((30.0, BALANCED.times(0.5)), (170.0, BALANCED.times(1.5)))
    with patch.object(planner, "GROWING", load):
        case = PlannerCase("growing", REPLICAS, 0)
        measured, record = run_case(case)
    last = record.samples[-1]
    assert all(last.replicas[role] > 2 and last.serving[role] > 2 for role in WorkerRole)
    assert measured.undone == 0
    assert [turns([each.replicas[role] for each in record.samples]) for role in WorkerRole] == [0, 0]
    assert picture(case, record).count("<path") > 4


def test_reversals_and_turns_count_what_is_undone() -> None:
    changes = [RoleChange(0.0, PREFILL), RoleChange(50.0, DECODE), RoleChange(90.0, DECODE), RoleChange(300.0, PREFILL)]
    assert (reversals(changes, 120.0), reversals(changes, 10.0)) == (1, 0)
    assert (turns([2, 4, 4, 6, 5, 4]), turns([2, 3, 2, 3])) == (1, 2)
    assert followed_s(changes, 40.0, DECODE) == 10.0
    assert followed_s(changes, 100.0, DECODE) == math.inf
