"""Invariants that are checked at the end of a simulated world."""

from types import SimpleNamespace
from typing import Any

import pytest

from baton.lab.simulation.client import RequestEnding, SimulatedHistory
from baton.lab.simulation.faults import SimulatedFaultKind
from baton.lab.simulation.invariants import Violation, check_all
from baton.router.request.attempt import POISON_DEATHS

GREEDY: Any = SimpleNamespace(number=3, deadline_s=60.0)


def world_with(deaths: int) -> Any:
    """Make a world. `deaths`: of a worker that is running again."""
    worker = SimpleNamespace(lives=[object()] * (deaths + 1), is_up=True)
    trace = SimpleNamespace(retried=[])
    return SimpleNamespace(
        workers=[worker], faults=[SimpleNamespace(kind=SimulatedFaultKind.KILL)], mended_s=0.0, trace=trace
    )


def failed(cause: str) -> SimulatedHistory:
    return SimulatedHistory(GREEDY, begun_s=1.0, ended_s=3.0, end=RequestEnding.FAILED, cause=cause, message="why")


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.lab.simulation.invariants.wrong_answer", lambda history: None)


def test_request_may_be_held_for_deadly_only_where_as_many_workers_died() -> None:
    check_all(world_with(POISON_DEATHS), [failed("POISON")])
    with pytest.raises(Violation, match="request 3: it failed with POISON"):
        check_all(world_with(POISON_DEATHS - 1), [failed("POISON")])


def test_no_other_failure_is_excused_by_deaths() -> None:
    with pytest.raises(Violation, match="request 3: it failed with INTERNAL"):
        check_all(world_with(9), [failed("INTERNAL")])
