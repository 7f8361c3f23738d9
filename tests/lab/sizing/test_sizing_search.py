"""The search for the cheapest candidate: which ones it tries, and what it recommends."""

import math

import pytest

from baton.lab.sizing.search import Prices, Search, SearchResult, SizingCandidate, WorkerNumbers, lower_bound
from baton.lab.sizing.trials import TrialFigures


def figures(prefill_load: float, decode_load: float, workers: WorkerNumbers) -> TrialFigures:
    """Return figures of workers under a load, given as the number of workers that it keeps busy."""
    ttft, tbt = (min(1.0, has / load) for has, load in zip(workers, (prefill_load, decode_load), strict=True))
    return TrialFigures(100, 0, 100 / ttft, 300 / ttft, 10 / tbt, 20 / tbt, ttft * tbt, ttft, tbt)


def found(prefill_load: float, decode_load: float, start: WorkerNumbers, most: int = 40) -> SearchResult:
    def evaluate(workers: WorkerNumbers) -> SizingCandidate:
        return SizingCandidate(workers, (figures(prefill_load, decode_load, workers),))

    return Search(evaluate, 0.95, most).run(start)


@pytest.mark.parametrize(("prefill_load", "decode_load"), [(0.5, 0.5), (3.2, 1.0), (1.0, 4.7), (6.0, 6.0)])
@pytest.mark.parametrize("start", [WorkerNumbers(1, 1), WorkerNumbers(2, 1), WorkerNumbers(5, 7)])
def test_from_any_start_one_worker_fewer_than_the_taken_ones_was_tried_and_misses(
    prefill_load: float, decode_load: float, start: WorkerNumbers
) -> None:
    result = found(prefill_load, decode_load, start)
    assert result.taken is not None
    taken = result.taken.workers
    assert taken == WorkerNumbers(math.ceil(prefill_load), math.ceil(decode_load))
    missed = {each.workers for each in result.tried if not each.meets(0.95)}
    assert {taken.more(role, -1) for role in WorkerNumbers._fields if getattr(taken, role) > 1} <= missed


def test_of_two_ways_the_dearer_role_loses_a_worker_first() -> None:
    def evaluate(workers: WorkerNumbers) -> SizingCandidate:
        good = float(sum(workers) >= 4)
        return SizingCandidate(workers, (TrialFigures(9, 0, 1.0 / sum(workers), 1.0, 1.0, 1.0, good, good, good),))

    cheap = Search(evaluate, 0.95, 40, Prices(1.0, 3.0)).run(WorkerNumbers(3, 3))
    assert cheap.taken is not None
    assert cheap.taken.workers == WorkerNumbers(3, 1)


def test_search_ends_soon_where_more_workers_of_neither_role_help() -> None:
    def evaluate(workers: WorkerNumbers) -> SizingCandidate:
        return SizingCandidate(workers, (TrialFigures(9, 0, 5000.0, 5000.0, 10.0, 20.0, 0.4, 0.4, 1.0),))

    result = Search(evaluate, 0.95, 40).run(WorkerNumbers(1, 1))
    assert result.taken is None
    assert [each.workers for each in result.tried] == [(1, 1), (2, 1), (2, 2)]


def test_no_more_workers_than_allowed_are_tried() -> None:
    result = found(30.0, 30.0, WorkerNumbers(1, 1), most=6)
    assert result.taken is None
    assert max(sum(each.workers) for each in result.tried) == 6


def test_candidate_meets_the_share_only_in_every_seed() -> None:
    runs = tuple(figures(1.0, 1.0 + late, WorkerNumbers(1, 1)) for late in (0.0, 0.0, 0.2))
    candidate = SizingCandidate(WorkerNumbers(1, 1), runs)
    assert candidate.of("share") == (1.0, pytest.approx(1 / 1.2), 1.0)
    assert not candidate.meets(0.95)


def test_lower_bound_is_rounded_down_and_one_at_least() -> None:
    assert [lower_bound(load, 100.0) for load in (5.0, 199.0, 250.0)] == [1, 1, 2]
