"""How long one waits, from what was measured: by the thousand, on a clock of their own."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.admission.queue import RETRY_AFTER_S, RETRY_LEAST_S, RETRY_MOST_S, WaitEstimate


def test_without_measurements_nobody_is_rejected_and_retries_wait_the_default() -> None:
    estimate = WaitEstimate()
    assert (estimate.wait_s(1000, 5.0), estimate.stay_s(10), estimate.usual_tokens) == (None, 0.0, 0)
    assert estimate.retry_after_s(1000, 5.0) == RETRY_AFTER_S


def test_first_rate_is_present_requests_over_their_stay() -> None:
    estimate = WaitEstimate()
    estimate.dispatched(100)
    estimate.ended(100, stayed_s=2.0, now=2.0)
    for _ in range(4):
        estimate.dispatched(100)
    assert estimate.tokens_per_s(2.0) == pytest.approx(200.0)  # 400 tokens, 2 s each
    assert estimate.wait_s(1000, 2.0) == pytest.approx(5.0)


def test_measured_rate_is_used_alone_after_a_second_of_waiting() -> None:
    """Nothing is in flight, so that Little's law says nothing."""
    estimate = WaitEstimate()
    estimate.dispatched(100)
    estimate.some_wait(True, 0.0)
    estimate.ended(100, None, 0.99)
    assert estimate.tokens_per_s(0.99) is None
    assert estimate.tokens_per_s(2.0) == pytest.approx(50.0, abs=0.5), "100 tokens in 2 s"


def test_stay_and_usual_tokens_are_means_of_answered_requests_alone() -> None:
    estimate = WaitEstimate()
    for tokens, stayed_s in ((100, 1.0), (300, 7.0), (10_000, None)):
        estimate.dispatched(tokens)
        estimate.ended(tokens, stayed_s, 1.0)
    assert estimate.usual_tokens == round((0.98 * 100 + 300) / 1.98)
    assert estimate.stay_s(398) == pytest.approx(7.98)


def test_retry_is_bounded_at_both_ends() -> None:
    estimate = WaitEstimate()
    estimate.dispatched(200)
    estimate.ended(100, 1.0, 1.0)
    assert estimate.tokens_per_s(1.0) == pytest.approx(100.0)
    retries = [estimate.retry_after_s(tokens, 1.0) for tokens in (1, 300, 10**6)]
    assert retries == pytest.approx([RETRY_LEAST_S, 3.0, RETRY_MOST_S])


@pytest.mark.parametrize("seed", range(20))
def test_wait_of_a_saturated_service_is_foretold(seed: int) -> None:
    """8 places, requests of 50 to 150 tokens that take 1 to 3 s each; each wait is foretold within a third of it."""
    draw = random.Random(seed)
    estimate, now = WaitEstimate(), 0.0
    running: list[tuple[float, float, int]] = []  # (ends, began, tokens)
    waiting = [draw.randint(50, 150) for _ in range(400)]
    foretold: dict[int, tuple[float, float]] = {}
    for turn, tokens in enumerate(waiting):
        if len(running) == 8:
            running.sort()
            now, began, freed = running.pop(0)
            estimate.ended(freed, now - began, now)
        if turn in foretold:
            told_at, told = foretold.pop(turn)
            assert told == pytest.approx(now - told_at, rel=0.34)
        estimate.dispatched(tokens)
        estimate.some_wait(True, now)
        running.append((now + draw.uniform(1.0, 3.0), now, tokens))
        if turn >= 40 and turn % 20 == 0 and turn + 60 < len(waiting):
            wait_s = estimate.wait_s(sum(waiting[turn + 1 : turn + 61]), now)
            assert wait_s is not None
            foretold[turn + 60] = (now, wait_s)


@pytest.mark.parametrize("taken_s", [3.0, 30.0, 120.0])
def test_wait_is_predicted_for_requests_of_minutes(taken_s: float) -> None:
    """One at a time, of 15 000 tokens each; asked at any moment between two ends."""
    estimate, now = WaitEstimate(), 0.0
    for number in range(40):
        estimate.dispatched(15_000)
        estimate.some_wait(True, now)
        for _ in range(round(taken_s)):
            now += 1.0
            wait_s = estimate.wait_s(15_000, now)
            assert number < 10 or wait_s == pytest.approx(taken_s, rel=0.34)
        estimate.ended(15_000, taken_s, now)


def test_idle_time_does_not_count() -> None:
    estimate = WaitEstimate()
    for second in range(20):
        estimate.dispatched(100)
        estimate.some_wait(True, float(second))
        estimate.ended(100, 1.0, second + 1.0)
    busy = estimate.tokens_per_s(20.0)
    estimate.some_wait(False, 20.0)
    assert estimate.tokens_per_s(10_000.0) == busy
    assert busy == pytest.approx(100.0, rel=0.1)


def test_workers_that_stand_still_make_the_wait_longer() -> None:
    estimate = WaitEstimate()
    estimate.dispatched(100)
    estimate.ended(100, 1.0, 1.0)
    estimate.dispatched(100)
    estimate.some_wait(True, 1.0)
    waits = [estimate.wait_s(100, now) or 0.0 for now in (1.0, 3.0, 9.0)]
    assert waits[0] < waits[1] < waits[2]


def test_time_that_the_router_itself_was_stopped_makes_the_wait_hardly_longer() -> None:
    estimate = WaitEstimate()
    for second in range(20):
        estimate.dispatched(100)
        estimate.some_wait(True, float(second))
        estimate.ended(100, 1.0, second + 1.0)
    before_s, after_s = estimate.wait_s(100, 20.0), estimate.wait_s(100, 100.0)
    assert before_s is not None and after_s is not None
    assert after_s < 1.5 * before_s


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 500), st.floats(0.01, 30), st.floats(0.0, 5), st.booleans()), max_size=30),
    st.lists(st.floats(0, 1e7), min_size=2, max_size=10),
)
def test_retry_after_is_bounded_and_grows_with_the_queue(
    ended: list[tuple[int, float, float, bool]], queues: list[float]
) -> None:
    estimate, now = WaitEstimate(), 0.0
    for tokens, stayed_s, passed_s, some_wait in ended:
        estimate.some_wait(some_wait, now)
        estimate.dispatched(2 * tokens)
        now += passed_s
        estimate.ended(tokens, stayed_s, now)
    retries = [estimate.retry_after_s(tokens, now) for tokens in sorted(queues)]
    assert retries == sorted(retries)
    assert all(RETRY_LEAST_S <= retry <= RETRY_MOST_S for retry in retries)
