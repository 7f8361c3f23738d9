"""The engine's thread as turns of the event loop: a step takes virtual time, in which other processes run.

A step computes at once, and while it does the clock of its thread runs ahead of all others: its posts, writes and
reports are seen when the others reach that time.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from engine.engine_thread import EngineThread, Steps, StepTiming
from simulation.loop import SimulatedLoop


class SimulatedEngineThread(EngineThread[Any, Any]):
    """All of the real one but the thread."""

    def __init__(
        self,
        engine: Steps[Any],
        on_step: Callable[[Sequence[Any], StepTiming], None],
        on_fault: Callable[[BaseException], None],
        observe: Callable[[], Any],
        prepare: Callable[[], None] = lambda: None,
        on_busy: Callable[[bool], None] = lambda busy: None,
    ) -> None:
        super().__init__(engine, on_step, on_fault, observe, prepare, on_busy)
        loop = asyncio.get_running_loop()
        if not isinstance(loop, SimulatedLoop):
            raise TypeError("a simulated thread needs a simulated loop")
        self._loop = loop
        self._sleeps = True

    def start(self) -> None:
        self._prepare()
        self._sleeps = False
        self._loop.call_soon(self._turn)

    def stop(self, timeout_s: float) -> bool:
        """It is between two steps, or in one whose outcome is not delivered."""
        self._stopped = True
        self._refuse_calls()
        return True

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        future = super().call(function, *arguments)
        self._wake()
        return future

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        super().post(function, *arguments)
        self._wake()

    def _wake(self) -> None:
        if self._sleeps and not self._stopped:
            self._sleeps = False
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Calls that were handed in, then a step; the next turn comes when the step has ended."""
        if self._stopped:
            return
        try:
            self._carry_out_calls(wait=False)
            computes = self._step()
            self.observed = self._observe()
        except Exception as fault:  # noqa: BLE001 -- as the real one
            self._on_fault(fault)
            self._stopped = True
            return
        finally:
            step_s, self._loop.ahead_s = self._loop.ahead_s, 0.0
        self._sleeps = not computes
        if computes:
            self._loop.call_later(step_s, self._turn)
