"""Search for the cheapest numbers of workers that meet the SLOs. Pure: the simulation is a function that is passed in.

The search starts at a lower bound and adds a worker to the role that misses its SLO more often, until enough
calls are in SLO. Then it removes workers while enough calls stay in SLO, so one worker fewer of
either role than in the result has been tried. It gives up if another worker of either role does not help: one prompt
may already take too long.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from baton.lab.sizing.trials import TrialFigures

HELPED = 0.005  # least gain in the fraction of calls in SLO that counts as help
SHORTER = 0.97  # a latency over its SLO that falls to this fraction of its last value counts as help too


class WorkerNumbers(NamedTuple):
    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.prefill}P+{self.decode}D"

    def more(self, role: str, workers: int = 1) -> "WorkerNumbers":
        if role == "prefill":
            return WorkerNumbers(self.prefill + workers, self.decode)
        return WorkerNumbers(self.prefill, self.decode + workers)


class Interval(NamedTuple):
    """Median, minimum and maximum of a figure over the seeds."""

    middle: float
    low: float
    high: float


def interval(values: Sequence[float]) -> Interval:
    return Interval(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class SizingCandidate:
    """Numbers of workers, and the figures of their simulation with each seed."""

    workers: WorkerNumbers
    runs: tuple[TrialFigures, ...]

    def of(self, name: str) -> Interval:
        """Return the interval of a field of TrialFigures."""
        return interval([float(getattr(run, name)) for run in self.runs])

    def meets(self, share: float) -> bool:
        """Return whether, with every seed, at least this fraction of calls is in SLO."""
        return self.of("share").low >= share


@dataclass(frozen=True, slots=True)
class SearchResult:
    tried: tuple[SizingCandidate, ...]  # cheapest first
    taken: SizingCandidate | None  # the recommended candidate; None if none has enough calls in SLO


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of one worker of each role, in any unit."""

    prefill: float = 1.0
    decode: float = 1.0

    def of(self, workers: WorkerNumbers) -> float:
        return workers.prefill * self.prefill + workers.decode * self.decode

    @property
    def dearest_first(self) -> tuple[str, str]:
        return ("prefill", "decode") if self.prefill >= self.decode else ("decode", "prefill")


class Search:
    def __init__(
        self,
        evaluate: Callable[[WorkerNumbers], SizingCandidate],
        share: float,
        most_workers: int,
        prices: Prices = Prices(),
    ) -> None:
        """Create a search. `share`: fraction of calls that must be in SLO. `most_workers`: limit for both roles."""
        self._evaluate = evaluate
        self._share = share
        self._most_workers = most_workers
        self._prices = prices
        self._known: dict[WorkerNumbers, SizingCandidate] = {}

    def run(self, start: WorkerNumbers) -> SearchResult:
        taken = self._up(start)
        if taken is not None:
            taken = self._down(taken)
        tried = sorted(self._known.values(), key=lambda each: (self._prices.of(each.workers), each.workers))
        return SearchResult(tuple(tried), taken)

    def _at(self, workers: WorkerNumbers) -> SizingCandidate:
        if workers not in self._known:
            self._known[workers] = self._evaluate(workers)
        return self._known[workers]

    def _up(self, workers: WorkerNumbers) -> SizingCandidate | None:
        """Add workers until enough calls are in SLO. Return None at the limit or if more of either role do not help."""
        before: SizingCandidate | None = None
        grew, in_vain = "", 0
        while sum(workers) <= self._most_workers:
            here = self._at(workers)
            if here.meets(self._share):
                return here
            in_vain = 0 if before is None or _helped(before, here) else in_vain + 1
            if in_vain == len(WorkerNumbers._fields):
                return None
            grew, before = _to_grow(here, grew if in_vain else ""), here
            workers = workers.more(grew)
        return None

    def _down(self, taken: SizingCandidate) -> SizingCandidate:
        """Remove workers while enough calls stay in SLO."""
        fewer = [taken.workers.more(role, -1) for role in self._prices.dearest_first]
        for workers in fewer:
            if min(workers) >= 1:
                candidate = self._at(workers)
                if candidate.meets(self._share):
                    return self._down(candidate)
        return taken


def _helped(before: SizingCandidate, here: SizingCandidate) -> bool:
    if here.of("share").middle >= before.of("share").middle + HELPED:
        return True
    missed = "ttft" if _misses_ttft(before) else "tbt"
    names = [f"{missed}_p50_ms", f"{missed}_p99_ms"]
    return any(here.of(name).middle <= SHORTER * before.of(name).middle for name in names)


def _misses_ttft(candidate: SizingCandidate) -> bool:
    """Return whether the TTFT SLO is missed at least as often as the TBT SLO."""
    return candidate.of("ttft_share").middle <= candidate.of("tbt_share").middle


def _to_grow(here: SizingCandidate, in_vain: str) -> str:
    """Return the role that gets the next worker. `in_vain`: the role whose last new worker did not help; empty if none.

    TTFT can also be missed because decode workers are full: if a prefill worker did not help, a decode worker is next.
    """
    wanted, other = ("prefill", "decode") if _misses_ttft(here) else ("decode", "prefill")
    return other if wanted == in_vain else wanted


def lower_bound(load: float, per_worker: float) -> int:
    """Return the least number of workers of a role for a load. Both arguments are in tokens per second."""
    return max(1, int(load / per_worker))
