"""TTFT and TBT of the last minute."""

from baton.router.trace.latency import (
    COUNTED_GAPS,
    LATENCY_REQUESTS,
    WINDOW_S,
    LatencyQuantiles,
    RecentFigures,
    RecentLatency,
)
from baton.router.trace.record import RequestRecord
from baton.router.types.request import Operation


def ended(at_s: float, ttft_ms: float | None, gaps_ms: tuple[float, ...] = ()) -> RequestRecord:
    """A request that ended at that time."""
    record = RequestRecord.begin(Operation.GENERATE, None)
    timeline = record.timeline
    timeline.ended_s = at_s
    timeline.arrived_s = at_s - 10.0
    if ttft_ms is not None:
        timeline.first_token_s = timeline.arrived_s + ttft_ms / 1e3
    now = at_s - 5.0
    for count, gap_ms in enumerate((0.0, *gaps_ms)):
        now += gap_ms / 1e3
        timeline.gaps.add(0, 1, now) if count or gaps_ms else None
    return record


def figures(*records: RequestRecord, now: float = 1000.0) -> RecentFigures | None:
    recent = RecentLatency()
    for record in records:
        recent.observe(record)
    return recent.figures(now)


def rounded(found: LatencyQuantiles | None) -> tuple[float, float] | None:
    return None if found is None else (round(found.p50_ms, 3), round(found.p99_ms, 3))


def test_quantiles_are_over_all_requests() -> None:
    found = figures(*(ended(1000.0, float(ttft), (10.0, 10.0, 200.0)) for ttft in range(100, 200)))
    assert found is not None and found.requests == 100
    assert rounded(found.ttft) == (150.0, 199.0)
    assert rounded(found.tbt) == (10.0, 200.0)


def test_what_ended_before_the_last_minute_does_not_count() -> None:
    old, new = ended(1000.0 - WINDOW_S - 1, 900.0, (90.0,)), ended(999.0, 100.0, (5.0,))
    found = figures(old, new)
    assert found is not None and found.requests == 1
    assert (rounded(found.ttft), rounded(found.tbt)) == ((100.0, 100.0), (5.0, 5.0))
    assert figures(old) is None


def test_a_request_without_a_first_token_does_not_count() -> None:
    assert figures(ended(1000.0, None)) is None


def test_answers_of_one_token_have_no_time_between_tokens() -> None:
    found = figures(ended(1000.0, 100.0))
    assert found is not None and found.tbt is None


def test_what_is_kept_is_bounded_to_the_newest() -> None:
    many = figures(*(ended(1000.0, float(number)) for number in range(LATENCY_REQUESTS + 50)))
    assert many is not None and many.requests == LATENCY_REQUESTS
    assert many.ttft.p50_ms > LATENCY_REQUESTS / 2
    slow_then_fast = [ended(1000.0, 1.0, (500.0,) * 1000)] * 2 + [ended(1000.0, 1.0, (5.0,) * 1000)] * 9
    assert COUNTED_GAPS < 9 * 1000
    assert rounded(figures(*slow_then_fast).tbt) == (5.0, 5.0)  # type: ignore[union-attr]
