"""What is kept of the newest requests: why they were placed as they were, and how fast they were. No prompt content."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from baton.router.trace.record import AttemptNote, RequestRecord
from baton.router.types.response import bare_id

KEPT_REQUESTS = 1024


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended."""

    status: str
    prompt_tokens: int
    ttft_ms: float
    total_ms: float
    tbt_p50_ms: float
    tbt_p99_ms: float


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """Made when a request has ended. The costs are those of the placement's own decision; names and text are made of
    it only when a request is explained.
    """

    request_id: str
    trace_id: str
    arrived_s: float
    outcome: Outcome
    attempts: Sequence[AttemptNote]


@dataclass(slots=True)
class DecisionRecords:
    """The newest requests by their ids; of two with one id the newer."""

    kept: int = KEPT_REQUESTS
    _by_id: OrderedDict[str, DecisionRecord] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, record: DecisionRecord) -> None:
        self._by_id.pop(record.request_id, None)
        self._by_id[record.request_id] = record
        if len(self._by_id) > self.kept:
            self._by_id.popitem(last=False)

    def find(self, given: str) -> DecisionRecord | None:
        """By the request's id, bare or as an answer bears it, or the id of its trace: of several the newest."""
        found = self._by_id.get(given) or self._by_id.get(bare_id(given))
        return found or next((each for each in reversed(self._by_id.values()) if each.trace_id == given), None)


WINDOW_S = 60.0
LATENCY_REQUESTS = 256
KEPT_GAPS = 1024  # of one request, the newest
COUNTED_GAPS = 8192  # of all requests, the newest: sorting them takes a millisecond


class Quantiles(NamedTuple):
    p50_ms: float
    p99_ms: float


class Latency(NamedTuple):
    """`tbt` is None where no answer had a token after those of the first step."""

    requests: int
    ttft: Quantiles
    tbt: Quantiles | None


class _Ended(NamedTuple):
    at_s: float
    ttft_ms: float
    gaps_ms: list[float]


class RecentLatency:
    """`observe` is called with every request that has ended; those without a first token do not count."""

    def __init__(self) -> None:
        self._ended: deque[_Ended] = deque(maxlen=LATENCY_REQUESTS)

    def observe(self, record: RequestRecord) -> None:
        timeline = record.timeline
        if timeline.first_token_s is None:
            return
        at_s = timeline.ended_s or timeline.last_token_s or timeline.first_token_s
        ttft_ms = (timeline.first_token_s - timeline.arrived_s) * 1e3
        self._ended.append(_Ended(at_s, ttft_ms, timeline.gaps.each_ms[-KEPT_GAPS:]))

    def figures(self, now: float) -> Latency | None:
        """`now` is in monotonic seconds. None where no request ended within WINDOW_S."""
        recent = [ended for ended in self._ended if now - ended.at_s <= WINDOW_S]
        if not recent:
            return None
        newest_gaps_ms = (gap_ms for ended in reversed(recent) for gap_ms in reversed(ended.gaps_ms))
        gaps_ms = list(islice(newest_gaps_ms, COUNTED_GAPS))
        return Latency(
            len(recent),
            quantiles(ended.ttft_ms for ended in recent),
            quantiles(gaps_ms) if gaps_ms else None,
        )


def quantiles(values_ms: Iterable[float]) -> Quantiles:
    """Of at least one value."""
    ordered = sorted(values_ms)
    return Quantiles(ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100])
