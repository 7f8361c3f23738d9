"""`baton replay` decides recorded placements again: the same code decides the same, and a change is named."""

from dataclasses import replace

import pytest

from baton.lab.replay.decisions import check_placements
from baton.lab.replay.predict import WhatIf
from baton.lab.replay.report import ReplayResult, as_text
from baton.router.placement import policies
from tests.lab.replay.incidents import placed, record_of, recorded_request

REQUESTS = [placed(recorded_request(f"r-{n}", 40, 4), 100 * n, 250) for n in range(6)]


def test_placements_of_the_same_code_are_as_recorded() -> None:
    check = check_placements(record_of(REQUESTS))
    assert (check.checked, check.unchecked, check.differences) == (6, 0, ())
    assert {each.placements[0].placement.prefill for each in REQUESTS} == {"p0:1", "p1:1"}


def test_placements_with_a_changed_record_name_the_request_and_the_fields() -> None:
    [own] = REQUESTS[4].placements
    assert own.placement.prefill == "p1:1"
    changed = replace(REQUESTS[4], placements=(replace(own, placement=own.placement._replace(prefill="p0:1")),))
    check = check_placements(record_of([*REQUESTS[:4], changed, *REQUESTS[5:]]))
    [difference] = check.differences
    assert (difference.request_id, difference.changed) == ("r-4", ("prefill",))
    text = as_text(ReplayResult(record_of([changed]), check, (), {}, (), WhatIf(), ()))
    assert "5 of 6 as recorded" in text and "prefill: recorded p0:1, now p1:1" in text
    assert "p1:1: {'endpoint': 'p1:1'" in text, "the inputs are shown"


def test_placements_by_changed_code_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "cheapest", lambda costs, turn: len(costs) - 1)
    monkeypatch.setattr("baton.router.placement.decide.cheapest", lambda costs, turn: len(costs) - 1)
    check = check_placements(record_of(REQUESTS))
    assert [each.request_id for each in check.differences] == ["r-0", "r-1", "r-2"]


def test_placements_of_another_router_are_not_checked() -> None:
    [own] = REQUESTS[0].placements
    adopted = replace(REQUESTS[0], placements=(replace(own, workers=None),))
    check = check_placements(record_of([adopted]))
    assert (check.checked, check.unchecked) == (0, 1)
