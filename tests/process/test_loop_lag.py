"""What kept an event loop from taking things in."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from baton.process.telemetry.loop_lag import KEPT, PERIOD_S, LoopLag
from tests.fixtures.waiting import eventually


class FakeLoop:
    """Calls what is due when its clock is set."""

    def __init__(self) -> None:
        self.now = 10.0
        self._due: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[..., None], *arguments: Any) -> None:
        self._due.append((when, callback, arguments))

    def run_at(self, now: float) -> None:
        self.now = now
        due, self._due = self._due, []
        for _, callback, arguments in due:
            callback(*arguments)


class Waits:
    """Seconds that the loop's thread has waited for a core, and the share of the time that others wait."""

    own_s = share = 0.0

    def own(self) -> float:
        return self.own_s

    def others(self) -> float:
        return self.share


@pytest.fixture
def loop() -> FakeLoop:
    return FakeLoop()


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
def lag(loop: FakeLoop, waits: Waits) -> LoopLag:
    made = LoopLag(loop, waits.own, waits.others)  # type: ignore[arg-type]
    made.start()
    return made


def test_punctual_loop_was_never_busy(loop: FakeLoop, lag: LoopLag) -> None:
    for index in range(1, 50):
        loop.run_at(10.0 + index * PERIOD_S)
    assert lag.between(0.0, 100.0) == (0.0, 0.0) and lag.busy_s == 0.0


def test_late_tick_shows_a_busy_time(loop: FakeLoop, lag: LoopLag) -> None:
    loop.run_at(10.0 + PERIOD_S + 0.3)
    assert lag.between(0.0, 100.0).busy_s == pytest.approx(0.3)
    assert lag.between(0.0, 10.1).busy_s == pytest.approx(0.1)
    assert lag.between(10.5, 11.0) == (0.0, 0.0)


def test_late_tick_without_a_core_is_no_busy_loop(loop: FakeLoop, lag: LoopLag, waits: Waits) -> None:
    waits.own_s, waits.share = 0.3, 1.5
    loop.run_at(10.0 + PERIOD_S + 0.3)
    assert lag.between(0.0, 100.0) == (pytest.approx(0.0), pytest.approx(1.5 * (PERIOD_S + 0.3)))


def test_other_threads_are_looked_at_a_while_after_the_loop_had_no_core(
    loop: FakeLoop, lag: LoopLag, waits: Waits
) -> None:
    waits.share = 1.0
    loop.run_at(10.0 + PERIOD_S)
    assert lag.between(0.0, 100.0).queued_s == 0.0
    waits.own_s, waits.share = 0.005, 0.0
    loop.run_at(10.0 + 2 * PERIOD_S)
    waits.share = 0.5
    loop.run_at(10.0 + 3 * PERIOD_S)
    assert lag.between(10.0 + 2 * PERIOD_S, 100.0).queued_s == pytest.approx(0.5 * PERIOD_S)


def test_two_ticks_at_the_same_time_count_once(loop: FakeLoop, lag: LoopLag, waits: Waits) -> None:
    late_s = 10.0 + PERIOD_S + 0.3
    loop.run_at(late_s)
    waits.own_s = 0.1
    loop.run_at(late_s)
    assert lag.between(0.0, 100.0) == (pytest.approx(0.3), 0.0)
    loop.run_at(late_s + 2 * PERIOD_S)
    assert lag.between(late_s, 100.0).queued_s == pytest.approx(0.1)


def test_old_ticks_are_forgotten(loop: FakeLoop, lag: LoopLag) -> None:
    now = 10.0
    for _ in range(KEPT + 10):
        now += PERIOD_S + 0.1
        loop.run_at(now)
    assert lag.between(0.0, now).busy_s == pytest.approx(KEPT * 0.1, rel=0.01)


async def test_real_loop_that_was_blocked(waits: Waits) -> None:
    loop = asyncio.get_running_loop()
    lag = LoopLag(loop, waits.own, waits.others)
    lag.start()
    began = loop.time()
    while loop.time() - began < 0.05:
        pass
    await eventually(lambda: lag.busy_s)
    lag.close()
    assert lag.between(began, loop.time()).busy_s >= 0.03


def test_failing_tick_is_not_the_last(loop: FakeLoop) -> None:
    failures = iter([OSError("no descriptor")])

    def others() -> float:
        for error in failures:
            raise error
        return 0.0

    own_s = iter([0.0, 1.0])  # the second reading, of a thread that waits, has the others looked at
    lag = LoopLag(loop, lambda: next(own_s, 0.0), others)  # type: ignore[arg-type]
    lag.start()
    with pytest.raises(OSError, match="no descriptor"):
        loop.run_at(loop.now + PERIOD_S)

    loop.run_at(loop.now + PERIOD_S + 0.5)

    assert lag.busy_s >= 0.4


def test_waits_between_adjoining_moments_add_up(loop: FakeLoop, lag: LoopLag, waits: Waits) -> None:
    for index in range(1, 200):
        waits.own_s += 0.003 * (index % 3)
        loop.run_at(10.0 + index * PERIOD_S)
    moments = [9.0 + 0.37 * index for index in range(20)]
    parts = [lag.between(began_s, ended_s).queued_s for began_s, ended_s in pairwise(moments)]
    assert sum(parts) == pytest.approx(lag.between(moments[0], moments[-1]).queued_s) == pytest.approx(waits.own_s)
    assert parts.count(0.0) == 7  # before the first check and after the last one
