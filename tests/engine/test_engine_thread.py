"""The thread that owns an engine: calls in order, steps between them, one loud end."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from baton.engine.runner.step_records import StepTiming
from baton.engine.runner.thread import EngineStopped, EngineThread
from tests.fixtures.waiting import wait_until

WAIT_S = 10.0


class FakeEngine:
    """Has `work` steps to do; each yields its number."""

    def __init__(self) -> None:
        self.work = 0
        self.done = 0
        self.fault: Exception | None = None
        self.threads: set[str] = set()

    def step(self) -> list[int] | None:
        self.threads.add(threading.current_thread().name)
        if self.fault is not None:
            raise self.fault
        if self.done == self.work:
            return None
        self.done += 1
        return [self.done]

    def add(self, steps: int) -> int:
        self.work += steps
        return self.work


class Rig:
    def __init__(self, prepare: Callable[[], None] = lambda: None) -> None:
        self.engine = FakeEngine()
        self.outcomes: list[int] = []
        self.timings: list[StepTiming] = []
        self.faults: list[BaseException] = []
        self.thread: EngineThread[int, int] = EngineThread(
            self.engine, self._on_step, self.faults.append, lambda: self.engine.done, prepare
        )

    def _on_step(self, outcomes: Any, timing: StepTiming) -> None:
        self.outcomes += outcomes
        self.timings.append(timing)


@pytest.fixture
def rig() -> Any:
    rig = Rig()
    rig.thread.start()
    yield rig
    assert rig.thread.stop(WAIT_S)


def test_engine_thread_steps_while_there_is_work_and_reports_each_step(rig: Rig) -> None:
    assert rig.thread.call(rig.engine.add, 3).result(WAIT_S) == 3
    wait_until(lambda: rig.thread.observed == 3)
    assert rig.outcomes == [1, 2, 3] and rig.thread.steps == 3
    assert all(timing.duration_ms >= 0 for timing in rig.timings)
    assert rig.engine.threads == {"engine"}


def test_calls_are_carried_out_in_order_posted_ones_too(rig: Rig) -> None:
    order: list[int] = []
    rig.thread.post(order.append, 1)
    rig.thread.call(order.append, 2)
    rig.thread.post(order.append, 3)
    rig.thread.call(lambda: None).result(WAIT_S)
    assert order == [1, 2, 3]


def test_an_error_in_a_call_is_its_callers_alone(rig: Rig) -> None:
    with pytest.raises(ZeroDivisionError):
        rig.thread.call(lambda: 1 // 0).result(WAIT_S)
    assert rig.thread.call(rig.engine.add, 1).result(WAIT_S) == 1
    assert not rig.faults


def test_a_call_that_was_cancelled_is_not_carried_out(rig: Rig) -> None:
    held, done = threading.Event(), threading.Event()
    rig.thread.post(held.wait, WAIT_S)
    cancelled = rig.thread.call(done.set)
    assert cancelled.cancel()
    held.set()
    rig.thread.call(lambda: None).result(WAIT_S)
    assert not done.is_set()


@pytest.mark.parametrize("how", ["step", "posted call", "preparation"])
def test_a_fault_is_told_once_and_refuses_all_calls(how: str) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    rig = Rig(prepare=broken if how == "preparation" else lambda: None)
    if how == "step":
        rig.engine.fault = ZeroDivisionError()
    if how == "posted call":
        rig.thread.post(broken)
    waiting = rig.thread.call(lambda: held.wait(WAIT_S)) if (held := threading.Event()) and how != "step" else None
    rig.thread.start()
    rig.thread.post(lambda: None)
    wait_until(lambda: len(rig.faults) == 1)
    assert isinstance(rig.faults[0], ZeroDivisionError)
    if waiting is not None:
        with pytest.raises(EngineStopped):
            waiting.result(WAIT_S)
    assert rig.thread.stop(WAIT_S)
    with pytest.raises(EngineStopped):
        rig.thread.call(lambda: None)
    rig.thread.post(broken)  # nobody is left to carry it out
    assert len(rig.faults) == 1


def test_stop_says_when_a_step_does_not_end() -> None:
    rig = Rig()
    held = threading.Event()
    rig.thread.start()
    rig.thread.post(held.wait, WAIT_S)
    assert not rig.thread.stop(0.01)
    held.set()
    assert rig.thread.stop(WAIT_S)
