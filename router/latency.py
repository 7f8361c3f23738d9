"""TTFT and TBT of the requests that ended in the last minute, as `baton status` shows them. Pure."""

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from router.request_record import RequestRecord

WINDOW_S = 60.0
KEPT_REQUESTS = 256
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
        self._ended: deque[_Ended] = deque(maxlen=KEPT_REQUESTS)

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
