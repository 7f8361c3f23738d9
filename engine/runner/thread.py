"""Thread that owns an engine: no other thread uses its scheduler, blocks and model.

Between two steps the thread executes queued calls in order. After a step it passes the outcomes to `on_step`. Callers
run on an event loop, but this file depends only on futures and a callback.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

from baton.engine.runner.core_use import CoreUse
from baton.engine.runner.step_records import StepTiming

Outcome = TypeVar("Outcome")
Computed = TypeVar("Computed", covariant=True)
Observation = TypeVar("Observation")
Result = TypeVar("Result")
logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.5  # interval at which an idle thread checks whether to stop; calls wake it immediately


class Steps(Protocol[Computed]):
    """Engine that the thread drives: `step` computes one plan, or returns None if nothing can run."""

    def step(self) -> Sequence[Computed] | None: ...


@dataclass(frozen=True, slots=True)
class EngineCall:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    future: "Future[Any] | None"  # None: no caller waits, and the function must not raise


class EngineStopped(RuntimeError):
    """The engine's thread has stopped, by request or by a fault."""


class EngineThread(Generic[Outcome, Observation]):
    """Runs an engine on its own thread.

    `on_step` is called on that thread after every computed step, and must only pass on its arguments. `on_fault` is
    called once if a step or a posted call raises: the process cannot continue. `observe` is called
    on the thread and creates a snapshot, which other threads may read at any time as `observed`.
    """

    def __init__(
        self,
        engine: Steps[Outcome],
        on_step: Callable[[Sequence[Outcome], StepTiming], None],
        on_fault: Callable[[BaseException], None],
        observe: Callable[[], Observation],
        prepare: Callable[[], None] = lambda: None,
        cores: CoreUse | None = None,
        spare_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Create the thread without starting it.

        `cores`: its cores, which another process may use while the thread has no work, or wants now. `spare_s`: called
        on the thread if they are wanted; returns for how many seconds the next step may wait.
        """
        self._engine = engine
        self._cores = cores
        self._spare_s = spare_s
        self._on_step = on_step
        self._on_fault = on_fault
        self._observe = observe
        self._prepare = prepare
        self._calls: queue.SimpleQueue[EngineCall | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._accepting = threading.Lock()
        self._stopped = False
        self.steps = 0
        self.idle_s = 0.0
        """Seconds without work before the step for which `on_step` is called."""
        self.lent_s = 0.0
        """Seconds before that step in which the thread had work, but lent its cores."""
        self.turns: int | None = None
        """Liveness counter: it grows with every step and, without work, twice per second. None before the thread starts
        and after it ends.
        """
        self.observed = observe()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Stop the thread after its current step. Returns whether it stopped in time."""
        with self._accepting:
            self._stopped = True
            self._calls.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def call(self, function: Callable[..., Result], *arguments: Any) -> "Future[Result]":
        """Run `function` on the engine's thread before its next step.

        Raises: EngineStopped, immediately or through the future.
        """
        future: Future[Result] = Future()
        with self._accepting:
            if self._stopped:
                raise EngineStopped("the engine has stopped")
            self._calls.put(EngineCall(function, arguments, cast("Future[Any]", future)))
        return future

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Run a function before the next step and ignore its result. It must not fail: if it raises, the engine stops.

        Does nothing after the engine has stopped.
        """
        with self._accepting:
            if not self._stopped:
                self._calls.put(EngineCall(function, arguments, None))

    def _run(self) -> None:
        try:
            self._prepare()
            idle, self.turns = True, 0
            while self._carry_out_calls(IDLE_WAIT_S if idle else 0.0) and self._lend():
                self._mark(True)
                idle = not self._step()
                if idle:
                    self._mark(False)
                self.observed = self._observe()
                self.turns += 1
        except BaseException as fault:  # any fault, including a panic of Rust code, must stop the worker
            logger.exception("engine failed; stopping the worker")
            self._on_fault(fault)
        finally:
            self.turns = None
            self._refuse_calls()

    def _mark(self, computing: bool) -> None:
        if self._cores is not None:
            self._cores.mark(computing)

    def _lend(self) -> bool:
        """While another process wants the cores and the next step can wait, execute only calls. Returns False if the
        thread must stop.
        """
        if self._cores is None or not self._cores.is_wanted:
            return True
        idle_s, goes_on = self.idle_s, True
        while goes_on and (spare_s := self._spare_s()) > 0.0:
            self._cores.mark(False)
            goes_on = self._carry_out_calls(min(spare_s, IDLE_WAIT_S))
        self.lent_s, self.idle_s = self.idle_s - idle_s, idle_s
        return goes_on

    def _carry_out_calls(self, wait_s: float) -> bool:
        """Execute the queued calls. `wait_s`: how long to wait for a first call. Returns False if the thread must
        stop.
        """
        while True:
            try:
                call = self._next_call(wait_s)
            except queue.Empty:
                return True
            wait_s = 0.0
            if call is None:
                return False
            if call.future is None:
                call.function(*call.arguments)
            elif call.future.set_running_or_notify_cancel():
                self._carry_out(call, call.future)

    def _next_call(self, wait_s: float) -> EngineCall | None:
        """Return the next queued call, or None if the thread must stop. Raises: queue.Empty if no call is queued."""
        if not wait_s:
            return self._calls.get_nowait()
        began = time.monotonic()
        try:
            return self._calls.get(timeout=wait_s)
        finally:
            self.idle_s += time.monotonic() - began

    @staticmethod
    def _carry_out(call: EngineCall, future: "Future[Any]") -> None:
        try:
            result = call.function(*call.arguments)
        except Exception as error:  # noqa: BLE001 -- it belongs to the caller, which gets it through the future
            future.set_exception(error)
        else:
            future.set_result(result)

    def _step(self) -> bool:
        started = time.monotonic()
        outcomes = self._engine.step()
        if outcomes is None:
            return False
        self.steps += 1
        self._on_step(outcomes, StepTiming(started, time.monotonic()))
        self.idle_s = self.lent_s = 0.0
        return True

    def _refuse_calls(self) -> None:
        with self._accepting:
            self._stopped = True
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            if call is not None and call.future is not None and call.future.set_running_or_notify_cancel():
                call.future.set_exception(EngineStopped("the engine has stopped"))
