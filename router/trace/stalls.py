"""Stalls (long gaps between tokens) of one request, and their causes. Pure.

The router measures the gaps between arrivals of tokens. The worker reports when it generated each token (only
differences of its clock are used) and why a token was late. The rest of a gap is transit: the event loops of worker and
router, and the network.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from baton.process.telemetry.loop_lag import Delay
from baton.router.trace.record import MAX_STALLS, GapSummary, LongGap, Stall, TokenGaps
from baton.text.causes import CausePart, StallCause, joined_causes

DelayBetween = Callable[[float, float], Delay]
"""Delay of the router's event loop between two monotonic times."""


@dataclass(frozen=True, slots=True)
class StallBound:
    """Length above which a gap is a stall: the larger of `factor` times the usual gap and `least_ms`."""

    factor: float = 2.0  # multiple of the request's median pause between tokens
    least_ms: float = 20.0

    def above(self, usual_ms: float) -> float:
        return max(self.least_ms, self.factor * usual_ms)


def gap_summary(gaps: TokenGaps, bound: StallBound, delay: DelayBetween) -> GapSummary | None:
    """Return the summary of a request's gaps, with its stalls; None without gaps."""
    ordered = sorted(gaps.each_ms)
    if not ordered:
        return None
    p50, pauses = ordered[len(ordered) // 2], sorted(gaps.pauses_ms)
    usual_ms = pauses[len(pauses) // 2]
    above_ms = bound.above(usual_ms)
    stalls = tuple(_stall(gap, usual_ms, delay) for gap in _longest(gaps.long, above_ms))
    p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return GapSummary(p50, p99, ordered[-1], stalls, sum(pause_ms > above_ms for pause_ms in pauses))


def _longest(gaps: Sequence[LongGap], above_ms: float) -> Sequence[LongGap]:
    """Return the MAX_STALLS longest of the gaps above `above_ms`, in chronological order."""
    stalls = sorted((gap for gap in gaps if gap.gap_ms > above_ms), key=lambda gap: -gap.gap_ms)
    return sorted(stalls[:MAX_STALLS], key=lambda gap: gap.ended_s)


def _stall(gap: LongGap, middle_ms: float, delay: DelayBetween) -> Stall:
    usual_ms, parts = _usual_and_parts(gap, middle_ms, delay(gap.began_s, gap.ended_s))
    return Stall(gap.ended_s, gap.gap_ms, gap.choice, usual_ms, tuple(joined_causes(parts)))


def _usual_and_parts(gap: LongGap, middle_ms: float, delay: Delay) -> tuple[float, list[CausePart]]:
    if gap.lost_worker is not None:
        return 0.0, [CausePart(StallCause.RECOVERY, gap.gap_ms, detail=gap.lost_worker)]
    if gap.on_worker_ms is None:  # first gap of an adopted answer, or the worker sent no timings
        usual_ms = min(middle_ms, gap.gap_ms)
        parts = _Parts(gap.gap_ms - usual_ms)
    else:
        parts = _Parts(max(0.0, gap.gap_ms - gap.on_worker_ms))
        usual_ms, of_worker = _of_worker(gap, middle_ms, gap.gap_ms - parts.left_ms)
        parts.found += of_worker
    parts.assign(StallCause.ROUTER_LOOP, delay.busy_s * 1e3)
    parts.found += _held(gap.held, parts.cut(gap.held_more_ms))
    parts.assign(StallCause.CPU_WAIT, delay.queued_s * 1e3, "of the router")
    for part in joined_causes(gap.waits.between(gap.began_s, gap.ended_s)):
        parts.assign(part.cause, part.ms, part.detail)
    parts.assign(StallCause.UNKNOWN if gap.on_worker_ms is None else StallCause.NETWORK, parts.left_ms)
    return usual_ms, parts.found


@dataclass(slots=True)
class _Parts:
    """Causes of a gap, added one by one. Each cause gets at most the time that is still unexplained (`left_ms`)."""

    left_ms: float
    found: list[CausePart] = field(default_factory=list)

    def cut(self, ms: float) -> float:
        """Subtract up to `ms` from the unexplained time, and return what was subtracted."""
        cut_ms = min(max(0.0, ms), self.left_ms)
        self.left_ms -= cut_ms
        return cut_ms

    def assign(self, cause: StallCause, ms: float, detail: str = "") -> None:
        self.found.append(CausePart(cause, self.cut(ms), detail=detail))


def _held(causes: Sequence[CausePart], held_ms: float) -> Iterator[CausePart]:
    total_ms = sum(part.ms for part in causes)
    if total_ms <= 0.0:
        yield CausePart(StallCause.WORKER_LOOP, held_ms)
    else:
        yield from _scaled(causes, held_ms / total_ms)


def _of_worker(gap: LongGap, middle_ms: float, ms: float) -> tuple[float, list[CausePart]]:
    """Return the usual length and the causes of a gap on the worker, scaled so that they add up to `ms`."""
    if gap.gap is None:  # the gap on the worker was too short for the worker to report causes
        usual_ms = min(middle_ms, ms)
        return usual_ms, [CausePart(StallCause.SLOWER, ms - usual_ms)]
    total_ms = gap.gap.usual_ms + sum(part.ms for part in gap.gap.causes)
    scale = ms / total_ms if total_ms > 0.0 else 0.0
    return gap.gap.usual_ms * scale, list(_scaled(gap.gap.causes, scale))


def _scaled(causes: Sequence[CausePart], scale: float) -> Iterator[CausePart]:
    for part in causes:
        yield CausePart(part.cause, part.ms * scale, part.request_id, part.detail)
