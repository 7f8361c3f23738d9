"""Latency of recently completed requests: TTFT and TBT of the router, and TBT of each decode worker."""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from baton.router.trace.record import RequestRecord

WINDOW_S = 60.0
LATENCY_REQUESTS = 256
KEPT_GAPS = 1024  # maximum number of newest token gaps per request, and per worker
COUNTED_GAPS = 8192  # maximum number of newest token gaps over all requests; sorting them takes 1 ms
KEPT_WORKERS = 1024


class LatencyQuantiles(NamedTuple):
    """Median and 99th percentile of TTFT or TBT."""

    p50_ms: float
    p99_ms: float


class RecentFigures(NamedTuple):
    requests: int
    ttft: LatencyQuantiles
    tbt: LatencyQuantiles | None  # None: no answer had tokens after its first step


class _Completed(NamedTuple):
    at_s: float
    ttft_ms: float
    gaps_ms: "array[float]"


class RecentLatency:
    """TTFT and TBT of requests that completed in the last WINDOW_S. Requests without a first token do not count."""

    def __init__(self) -> None:
        self._completed: deque[_Completed] = deque(maxlen=LATENCY_REQUESTS)

    def observe(self, record: RequestRecord) -> None:
        """Add the TTFT and token gaps of a completed request."""
        timeline = record.timeline
        if timeline.first_token_s is None:
            return
        at_s = timeline.ended_s or timeline.last_token_s or timeline.first_token_s
        ttft_ms = (timeline.first_token_s - timeline.arrived_s) * 1e3
        self._completed.append(_Completed(at_s, ttft_ms, timeline.gaps.newest_ms(KEPT_GAPS)))

    def figures(self, now: float) -> RecentFigures | None:
        """Return the quantiles of the window that ends at `now` (monotonic seconds); None without requests in it."""
        recent = [each for each in self._completed if now - each.at_s <= WINDOW_S]
        if not recent:
            return None
        newest_gaps_ms = (gap_ms for each in reversed(recent) for gap_ms in reversed(each.gaps_ms))
        gaps_ms = list(islice(newest_gaps_ms, COUNTED_GAPS))
        return RecentFigures(
            len(recent),
            quantiles(each.ttft_ms for each in recent),
            quantiles(gaps_ms) if gaps_ms else None,
        )


def quantiles(values_ms: Iterable[float]) -> LatencyQuantiles:
    """Return the median and 99th percentile of at least one value."""
    ordered = sorted(values_ms)
    return LatencyQuantiles(ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100])


class WorkerTokenTimes:
    """Newest gaps between tokens (TBT) of each decode worker."""

    def __init__(self) -> None:
        self._gaps_ms: OrderedDict[str, array[float]] = OrderedDict()

    def observe(self, record: RequestRecord) -> None:
        """Add the token gaps of a completed request to those of its decode worker."""
        if record.timeline.placement is not None:
            self._add(record.timeline.placement.decode, record.timeline.gaps.newest_ms(KEPT_GAPS))

    def quantiles(self, endpoint: str) -> LatencyQuantiles | None:
        """Return the TBT quantiles of a decode worker; None if no gaps were observed."""
        gaps_ms = self._gaps_ms.get(endpoint)
        return quantiles(gaps_ms) if gaps_ms else None

    def _add(self, endpoint: str, gaps_ms: Sequence[float]) -> None:
        kept = self._gaps_ms.setdefault(endpoint, array("d"))
        kept.extend(gaps_ms)
        del kept[:-KEPT_GAPS]
        self._gaps_ms.move_to_end(endpoint)
        if len(self._gaps_ms) > KEPT_WORKERS:
            self._gaps_ms.popitem(last=False)
