"""How far another process's clock is off, with an error that holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.process.telemetry.clock_offset import KEPT, ClockEstimate

SECONDS = st.floats(0.0, 2.0)


def test_nothing_is_known_at_first_and_a_clock_that_was_set_is_left_out() -> None:
    estimate = ClockEstimate()
    estimate.take(sent_s=10.0, received_s=9.0, kept_s=0.0, other_s=50.0)
    assert estimate.best is None


def test_fastest_way_counts_until_it_is_old() -> None:
    estimate = ClockEstimate()
    for way_s in (0.2, 0.02, 0.4):
        estimate.take(10.0, 10.0 + way_s, 0.0, 110.0 + way_s)
    assert estimate.best is not None and estimate.best.error_s == pytest.approx(0.01)
    for _ in range(KEPT):
        estimate.take(10.0, 10.4, 0.0, 110.4)
    assert estimate.best is not None and estimate.best.error_s == pytest.approx(0.2)


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=30))
def test_true_offset_is_within_the_error(offset_s: float, ways: list[tuple[float, float, float]]) -> None:
    """Whatever the two ways take, and however long the other process keeps the message."""
    estimate, now = ClockEstimate(), 1000.0
    for there_s, kept_s, back_s in ways:
        answered_s = now + there_s + kept_s
        estimate.take(now, answered_s + back_s, kept_s, answered_s + offset_s)
        now = answered_s + back_s
    assert estimate.best is not None
    assert abs(estimate.best.offset_s - offset_s) <= estimate.best.error_s + 1e-5
