"""Event loop of several simulated processes in virtual time; a seed decides which process runs next.

Callbacks of one process run in order, as in asyncio. When no callback is ready, the clock jumps to the next timer. A
killed process runs nothing any more, not even its clean-up. A hanging process runs nothing until it continues.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context, ContextVar, copy_context
from enum import Enum, auto
from heapq import heappop, heappush
from typing import Any, TypeVar

Result = TypeVar("Result")
MOST_CALLBACKS_AT_ONCE = 100_000  # maximum number of callbacks at one time of the clock
THREAD_DELAY_S = 0.002  # maximum delay of work in an executor


class State(Enum):
    RUNS = auto()
    HANGS = auto()
    DEAD = auto()


RUNS, DEAD = State.RUNS, State.DEAD  # avoid the slow lookup of an Enum member in every callback


class SimulatedProcess:
    """Simulated process: the callbacks that run in its `context`, and stop together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = State.RUNS
        self.ready: deque[PlannedCall] = deque()
        self.listed = False  # whether it is in the loop's list of ready processes
        self.context = copy_context()
        self.context.run(CURRENT.set, self)


CURRENT: ContextVar[SimulatedProcess | None] = ContextVar("simulated_process", default=None)
"""Simulated process of the running callback; None: the simulation itself."""
_CURRENT: ContextVar[Any] = CURRENT  # the same variable, typed for Context.get


class PlannedCall:
    """Planned callback, with the methods of asyncio's handles that are used here."""

    __slots__ = ("arguments", "callback", "context", "process", "when_s")

    def __init__(
        self,
        process: SimulatedProcess,
        context: Context,
        callback: Callable[..., object],
        arguments: tuple[Any, ...],
        when_s: float,
    ) -> None:
        self.process = process
        self.context = context
        self.callback: Callable[..., object] | None = callback
        self.arguments = arguments
        self.when_s = when_s

    def cancel(self) -> None:
        self.callback, self.arguments = None, ()

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return self.when_s

    def __repr__(self) -> str:
        return f"{self.process.name}: {self.callback}"


class SimulatedTask(asyncio.Task[Any]):
    """Task whose hash is its number: sets of tasks, as in task groups, then have a repeatable order."""

    def __init__(self, *arguments: Any, number: int, **more: Any) -> None:
        self._number = number
        super().__init__(*arguments, **more)

    def __hash__(self) -> int:
        return self._number


class OutOfTurns(Exception):
    """Error of a simulation: callbacks run endlessly at one time of the clock, or no callback is left."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """Event loop in virtual time. `ahead_s`: lead of the computing engine thread's clock (see `host.py`)."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.now_s = 1000.0  # monotonic clock; does not start at 0, which some code uses for "never"
        self.ahead_s = 0.0
        self.callbacks = 0
        self._draw = draw
        self._harness = SimulatedProcess("harness")
        self._turns: list[SimulatedProcess] = []
        self._timers: list[tuple[float, int, PlannedCall]] = []
        self._timer_number = 0
        self._task_number = 0
        self._at_once = 0
        self._kept: list[object] = []  # objects of dead processes: their generators must not be closed while others run

    def time(self) -> float:
        return self.now_s + self.ahead_s

    def kill(self, process: SimulatedProcess) -> None:
        """End a process as SIGKILL does: drop its callbacks without any clean-up."""
        self._kept.append(asyncio.all_tasks(self))
        self._kept.append(process.ready)
        process.state = State.DEAD
        process.ready = deque()

    def hang(self, process: SimulatedProcess) -> None:
        """Stop a process as SIGSTOP does: its callbacks wait until `go_on`."""
        if process.state is State.RUNS:
            process.state = State.HANGS

    def go_on(self, process: SimulatedProcess) -> None:
        if process.state is State.HANGS:
            process.state = State.RUNS
            self._list(process)

    def forget(self) -> None:
        """Drop all planned callbacks at the end of a simulation."""
        self._kept.clear()
        self._timers.clear()
        self._turns.clear()

    # Methods of asyncio's event loops.

    get_debug = staticmethod(bool)  # bool() is False; called for every future, so it must be fast

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> PlannedCall:
        if self.ahead_s:
            return self.call_at(self.now_s + self.ahead_s, callback, *args, context=context)
        if context is None:
            context = copy_context()
        process = context.get(_CURRENT) or self._harness
        planned = PlannedCall(process, context, callback, args, 0.0)
        if process.state is not DEAD:
            process.ready.append(planned)
            if not process.listed:
                process.listed = True
                self._turns.append(process)
        else:
            self._kept.append(planned)
        return planned

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Result], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Result]:
        self._task_number += 1
        return SimulatedTask(coro, loop=self, name=name, context=context, number=self._task_number)

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> PlannedCall:
        return self.call_at(self.now_s + self.ahead_s + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> PlannedCall:
        if context is None:
            context = copy_context()
        planned = PlannedCall(context.get(_CURRENT) or self._harness, context, callback, args, when)
        self._timer_number += 1
        heappush(self._timers, (when, self._timer_number, planned))
        return planned

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Result], *args: Any
    ) -> asyncio.Future[Result]:
        """Run `func` on this thread after at most THREAD_DELAY_S."""
        future: asyncio.Future[Result] = self.create_future()
        self.call_later(self._draw.random() * THREAD_DELAY_S, _settle, future, func, args)
        return future

    def add_signal_handler(  # type: ignore[override]
        self, sig: int, callback: Callable[..., object], *args: Any
    ) -> None:
        """Do nothing: simulated processes are stopped by `Running.on_signal`."""

    def remove_signal_handler(self, sig: int) -> bool:
        return False

    def _process_events(self, event_list: object) -> None:
        """Do nothing: there are no selector events."""

    def _write_to_self(self) -> None:
        """Do nothing: no thread waits in a selector."""

    def _run_once(self) -> None:
        turns, draw = self._turns, self._draw.random
        while not self._stopping:  # type: ignore[attr-defined]
            if not turns:
                self._advance()
                continue
            place = int(draw() * len(turns)) if len(turns) > 1 else 0
            process = turns[place]
            if not process.ready or process.state is not RUNS:
                process.listed = False
                turns[place] = turns[-1]
                turns.pop()
                continue
            planned = process.ready.popleft()
            callback = planned.callback
            if callback is not None:
                self.callbacks += 1
                self._at_once += 1
                if self._at_once > MOST_CALLBACKS_AT_ONCE:
                    raise OutOfTurns(f"{self._at_once} callbacks at one time of the clock, the last one {planned}")
                try:
                    planned.context.run(callback, *planned.arguments)
                except Exception as error:  # noqa: BLE001 -- like asyncio: report the error and continue
                    self.call_exception_handler({"message": f"Exception in callback of {planned}", "exception": error})

    def _advance(self) -> None:
        """Advance the clock to the next pending timer."""
        timers = self._timers
        while timers:
            when_s, _, planned = heappop(timers)
            if planned.callback is None:
                continue
            if when_s > self.now_s:
                self.now_s, self._at_once = when_s, 0
            process = planned.process
            if process.state is DEAD:
                self._kept.append(planned)
                continue
            process.ready.append(planned)
            self._list(process)
            if self._turns:
                return
        raise OutOfTurns("no callback and no timer is left, but the simulation has not finished")

    def _list(self, process: SimulatedProcess) -> None:
        if not process.listed:
            process.listed = True
            self._turns.append(process)


def _settle(future: asyncio.Future[Result], function: Callable[..., Result], arguments: tuple[Any, ...]) -> None:
    if future.cancelled():
        return
    try:
        result = function(*arguments)
    except Exception as error:  # noqa: BLE001 -- delivered to the waiting caller
        future.set_exception(error)
    else:
        future.set_result(result)


def spawn(
    loop: SimulatedLoop, process: SimulatedProcess, work: Coroutine[Any, Any, Result], name: str
) -> asyncio.Task[Result]:
    """Create a task that runs in `process`."""
    return loop.create_task(work, name=name, context=process.context)
