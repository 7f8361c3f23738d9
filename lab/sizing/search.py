"""Search over numbers of workers. Pure: a trial is a function that is passed in.

From a lower bound, the role that misses its SLO more often gets one more worker until the share in SLO is met; then
workers are removed again as long as it stays met. So one worker fewer of either role was tried, and misses it. If one
more worker of each role, in turn, does not help, the search ends: a prompt may take too long by itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from baton.lab.sizing.trials import TrialFigures

HELPED = 0.005  # of the share in SLO: less than that is no help
SHORTER = 0.97  # times the time that missed its SLO: less of a change is no help either


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
    """The median of the seeds, and their range."""

    middle: float
    low: float
    high: float


def interval(values: Sequence[float]) -> Interval:
    return Interval(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class SizingCandidate:
    """Candidate with `runs`, one for each seed."""

    workers: WorkerNumbers
    runs: tuple[TrialFigures, ...]

    def of(self, name: str) -> Interval:
        """A figure, by the name of its field."""
        return interval([float(getattr(run, name)) for run in self.runs])

    def meets(self, share: float) -> bool:
        """Return whether every seed meets the share."""
        return self.of("share").low >= share


@dataclass(frozen=True, slots=True)
class SearchResult:
    tried: tuple[SizingCandidate, ...]  # cheapest first
    taken: SizingCandidate | None  # None: the most workers that are allowed do not suffice


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
        """Create a search. `share`: of calls that must be in SLO. `most_workers`: of both roles together."""
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
        """Add workers until the share is met; None if the maximum does not suffice, or more of neither role help."""
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
        """Remove workers while the share stays met; the result with one fewer of either role was simulated."""
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
    """Return whether TTFT is missed more often than TBT."""
    return candidate.of("ttft_share").middle <= candidate.of("tbt_share").middle


def _to_grow(here: SizingCandidate, in_vain: str) -> str:
    """TTFT may be missed for want of places on decode workers: where one more prefill worker did not help, the other
    role gets the next one. `in_vain`: the role that got one more worker which did not help, if there is one.
    """
    wanted, other = ("prefill", "decode") if _misses_ttft(here) else ("decode", "prefill")
    return other if wanted == in_vain else wanted


def lower_bound(load: float, per_worker: float) -> int:
    """Return the number of workers of one role below which it could not keep up; both arguments in tokens per
    second.
    """
    return max(1, int(load / per_worker))
