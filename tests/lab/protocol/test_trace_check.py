"""Traces of simulated worlds: the specification accepts those of the code, and refuses those of a planted bug."""

import random
from collections.abc import Callable

import pytest

from baton.lab.protocol.state import ClientPhase
from baton.lab.protocol.trace_check import Dispatched, TraceCheck
from baton.lab.simulation.client import SimulatedRequest
from baton.lab.simulation.faults import SimulatedFault, SimulatedFaultKind
from baton.lab.simulation.model import ModelRequest
from baton.lab.simulation.planted import planted
from baton.lab.simulation.world import World, WorldOptions, run_seed

WORLDS_TO_LOOK_IN = 100  # the order of sets differs between runs, so no single seed is sure to show a bug
KILLS = WorldOptions(requests=6, faults=4, kinds=(SimulatedFaultKind.KILL,))


def test_events_of_worlds_with_faults_are_allowed() -> None:
    results = [run_seed(seed, WorldOptions(requests=4)) for seed in range(60, 66)]
    assert [(result.seed, result.found) for result in results if result.found is not None] == []
    assert sum(result.exercised["steps that the specification allowed"] for result in results) > 1000


@pytest.mark.parametrize(
    "plant, likely, options, why",
    [
        ("early-confirm", 2, WorldOptions(requests=6, faults=0), "a copy is confirmed that no reader has completed"),
        ("dropped-pin", 22, WorldOptions(requests=6), "pinned blocks are released"),
        ("reused-transfer-id", 4, WorldOptions(requests=6), "a transfer id is used twice"),
        ("off-by-one-offset", 0, KILLS, "a token has a wrong offset"),
    ],
)
def test_planted_bug_is_refused_by_specification_and_invariants(
    plant: str, likely: int, options: WorldOptions, why: str
) -> None:
    """`likely`: seed of a world that usually shows the bug; if it does not, the other worlds are run."""
    refused, violated = False, False
    with planted(plant):
        for seed in (likely, *range(WORLDS_TO_LOOK_IN)):
            result = run_seed(seed, options)
            refused |= result.refusal is not None and why in result.refusal
            violated |= result.violation is not None
            if refused and violated:
                return
    assert refused and violated


def long_answers(draw: random.Random, count: int, span_s: float, most_tokens: int) -> list[SimulatedRequest]:
    asked = ModelRequest((1, 2, 3, 4, 5), 40, 0.0, 1, ignores_end=True, looks_back=False)
    return [SimulatedRequest(number, 0.0, asked, 1, False, 30.0, None) for number in range(count)]


def killed_router(draw: random.Random, world: World, *_: object) -> list[SimulatedFault]:
    return [SimulatedFault(SimulatedFaultKind.KILL, 0.7, "router-0", "", 0.3)]


def can_adopt(seed: int) -> bool:
    """Return whether a seed has two routers, and answers that take longer than 0.7 s."""
    world = World(seed, WorldOptions(), None)
    world.loop.forget()
    world.loop.close()
    return len(world.routers) == 2 and world.shape.pace.fixed_s > 0.02


def test_doubled_adoption_is_refused_by_specification_and_invariants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.lab.simulation.world.draw_requests", long_answers)
    monkeypatch.setattr("baton.lab.simulation.world.draw_faults", killed_router)
    options = WorldOptions(requests=4)
    for seed in filter(can_adopt, range(WORLDS_TO_LOOK_IN)):
        with planted("doubled-adoption"):
            found = run_seed(seed, options)
        if found.exercised["answers taken over by another router"]:
            assert "an adoption is" in (found.refusal or "")
            assert "duplicate attempt id" in (found.violation or "")
            assert run_seed(seed, options).found is None
            return
    pytest.fail("no answer was adopted")


class TracedRun:
    """Trace of one request up to the last step before the one under test."""

    def __init__(self) -> None:
        self.check = check = TraceCheck()
        check.asked_by_client("r", 1, in_order=True)
        check.connected("stream", "r", "router-0", [0])
        check.dispatched("stream", Dispatched("attempt", b"id", range(1), "prefill-0", "decode-0", 0))
        check.announced(b"id")
        check.arrived("at decode", "attempt", is_answer=True)
        check.reserved("at decode", 0)
        check.opened(b"id")
        check.offered(b"id", [7, 8])
        check.completed(b"id")

    def copied(self) -> TraceCheck:
        self.check.copy_began(b"id", [(0, 7), (1, 8)])
        self.check.copy_ended(b"id", 2, is_done=True)
        return self.check

    def running(self) -> TraceCheck:
        check = self.copied()
        check.asked_to_close(b"id")
        check.closed(b"id", complete=True, valid=True)
        check.activated("at decode")
        return check


def test_trace_of_an_answer_is_accepted_to_its_end() -> None:
    check = TracedRun().running()
    check.released("stream", 0, 0, 1)
    check.delivered("r", 0, 0, 1)
    check.made("attempt", 0, 2)
    check.retained("attempt")
    check.released("stream", 0, 1, 1)
    check.delivered("r", 0, 1, 1)
    check.closed_by_router("attempt")
    check.ended("r", ClientPhase.ANSWERED)
    assert check.refusal is None and check.left_over() is None


@pytest.mark.parametrize(
    "event, why",
    [
        (lambda check: check.delivered("r", 0, 1, 1), "the client receives a token twice, or one is left out"),
        (lambda check: check.delivered("r", 0, 0, 1), "the client receives a token that was not released"),
        (lambda check: check.released("stream", 0, 0, 2), "that no worker has generated"),
        (lambda check: check.made("attempt", 0, 3), "a token has a wrong offset"),
        (lambda check: check.activated("at decode"), "an answer starts without a confirmed copy"),
        (lambda check: check.arrived("again", "attempt", is_answer=True), "a command arrives twice"),
        (lambda check: check.announced(b"id"), "the transfer id is used twice"),
    ],
)
def test_event_that_is_not_enabled_in_a_running_answer_is_refused(
    event: Callable[[TraceCheck], None], why: str
) -> None:
    check = TracedRun().running()
    event(check)
    assert check.refusal is not None and why in check.refusal


def test_copy_of_a_block_that_was_not_offered_is_refused() -> None:
    check = TracedRun().check
    check.copy_began(b"id", [(0, 6)])
    assert check.refusal is not None and "not offered for this request" in check.refusal


def test_copy_from_a_dropped_transfer_is_not_confirmed() -> None:
    run = TracedRun()
    run.check.copy_began(b"id", [(0, 7), (1, 8)])
    run.check.dropped(b"id")
    run.check.copy_ended(b"id", 2, is_done=True)
    run.check.asked_to_close(b"id")
    run.check.closed(b"id", complete=True, valid=True)
    assert run.check.refusal is not None and "not pinned throughout" in run.check.refusal


def test_kept_blocks_are_only_those_that_the_source_confirmed() -> None:
    check = TracedRun().copied()
    check.confirmed(b"id", pinned=True)
    check.kept("at decode", 2)
    assert check.refusal is None
    check = TracedRun().copied()
    check.kept("at decode", 2)
    assert check.refusal is not None and "that the source has not confirmed" in check.refusal


def test_request_that_never_ends_is_left_over() -> None:
    assert "never ended" in (TracedRun().check.left_over() or "")
