"""Why a request went where it went: kept for the newest, bounded, with what was weighed and what happened."""

from types import SimpleNamespace
from typing import Any

import pytest

from router.events import Failed, FailureReason, FirstStep, Landed, PrefillTimings
from router.explaining import Explainer
from router.explanation import KEPT_CANDIDATES, AttemptNote, Explanation, Explanations, Outcome, candidates_of
from router.placement import Placement, PlacementPolicy, PlacementRequest, WorkerView, place
from router.timeline import Timeline
from router.worker import WorkerRole
from service.errors import NotFound

REQUEST = PlacementRequest(fingerprint=b"f", block_tokens=4, prompt_tokens=18, max_tokens=6, choices=1)
OUTCOME = Outcome("OK", 18, 10.0, 20.0, 1.0, 2.0)


def workers(prefill: int = 2, decode: int = 2) -> tuple[WorkerView, ...]:
    return (
        *(
            WorkerView(f"p{n}", WorkerRole.PREFILL, b"f", 100, 0, 0, 0, tokens_in_flight=100 * n)
            for n in range(prefill)
        ),
        *(WorkerView(f"d{n}", WorkerRole.DECODE, b"f", 100, 8, 100, 8 * (n == 0)) for n in range(decode)),
    )


def note(views: tuple[WorkerView, ...], attempt_id: int = 1) -> AttemptNote:
    placement = place(REQUEST, views, PlacementPolicy())
    assert isinstance(placement, Placement)
    return AttemptNote(REQUEST, placement, candidates_of(placement, views), 1.0, 1.5, attempt_id=attempt_id)


def record(timeline: Timeline, error: str | None = None) -> Any:
    prepared = SimpleNamespace(token_ids=tuple(range(18)), valid=SimpleNamespace(request_id="r"))
    return SimpleNamespace(prepared=prepared, timeline=timeline, error=error)


def test_a_ring_keeps_the_newest_and_of_one_id_the_newer() -> None:
    kept = Explanations(kept=3)
    for name in ("a", "b", "a", "c", "d"):
        kept.add(Explanation(name, 0.0, OUTCOME, ()))
    assert [kept.find(name) is not None for name in "abcd"] == [True, False, True, True]
    assert len(kept) == 3


def test_of_many_candidates_the_chosen_ones_are_kept() -> None:
    many = tuple(reversed(workers(prefill=60, decode=60)))
    kept = note(many)
    assert len(kept.candidates) == KEPT_CANDIDATES
    assert {view.endpoint for view in kept.candidates} >= set(kept.placement.endpoints)


def test_it_tells_of_every_attempt_who_was_weighed_chosen_and_excluded_and_what_came_of_it() -> None:
    timeline, explainer = Timeline(0.0), Explainer(str.upper, clock=lambda: 9.0)
    timeline.begin_attempt(note(workers()), 1.4)
    timeline.take_failure(Failed(1, "p0", FailureReason.WORKER_LOST, "it fell silent"))
    timeline.begin_attempt(note(workers(), attempt_id=2), 2.4)
    timeline.take_first_step(FirstStep(2, (), PrefillTimings(2.0, (3.0, 4.0), 9.0, cached_tokens=8)), 3.0)
    timeline.take_landed(Landed(2, 640, 0.5, 0.25, 0.0, 1.0, "shared_memory", cached_tokens=4))
    explainer.observe(record(timeline))

    told = explainer.explain("r")
    assert (told.status, told.age_s, told.prompt_tokens) == ("OK", 9.0, 18)
    first, second = told.attempts
    assert (first.failure, first.failed_endpoint) == ("WORKER_LOST: it fell silent", "p0")
    assert (second.failure, second.transport) == ("", "shared_memory")
    assert dict(second.actual) | {"cached_tokens": 8, "prefill_ms": 7, "transfer_bytes": 640} == dict(second.actual)
    candidates = {each.worker_id: each for each in second.candidates}
    assert [candidates[name].chosen for name in ("P0", "P1", "D0", "D1")] == [True, False, True, False]
    assert candidates["P1"].terms["tokens_in_flight"] == 100
    assert candidates["D1"].excluded == "no place in its batch"
    assert candidates["P1"].excluded == ""


def test_who_was_never_placed_or_is_forgotten_is_not_found() -> None:
    explainer = Explainer(str)
    explainer.observe(record(Timeline(0.0), error="UNAVAILABLE"))
    with pytest.raises(NotFound):
        explainer.explain("r")
