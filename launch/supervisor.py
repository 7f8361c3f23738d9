"""Supervisor of a run's processes: it restarts those that die, with back-off, and stops all in order."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from baton.launch.processes import Backoff, ChildProcess, ProcessSpec, Stage
from baton.process.serving.exit_codes import FINAL, ExitCode

MAX_EARLY_DEATHS = 3

Start = Callable[[ProcessSpec], Awaitable[ChildProcess]]


class ServiceFailed(Exception):
    """Error: a process that the service needs cannot be kept running."""

    def __init__(self, message: str, tail: Sequence[str] = ()) -> None:
        """Create the error. `tail`: the last lines of the process's output."""
        super().__init__(message)
        self.tail = tuple(tail)


class Ending(NamedTuple):
    """Exit of a process. `code`: None if it did not start."""

    code: int | None
    text: str
    tail: Sequence[str] = ()


REASONS: Mapping[int, str] = {
    ExitCode.WRONG_CONFIGURATION: "its configuration or model cannot be used",
    ExitCode.STALLED: "it made no progress",
    ExitCode.CANNOT_LISTEN: "it cannot listen on its address",
    ExitCode.OUT_OF_MEMORY: "it is out of memory",
}


def describe_exit(code: int) -> str:
    """Format an exit code: 1 -> `ended with exit code 1`; -9 -> `was ended by SIGKILL`."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" + (f": {REASONS[code]}" if code in REASONS else "")


class Supervisor:
    """Owner of every child process from `start` to the end of `stop`.

    A process is given up if its exit code is final, if it dies three times before `mark_ready`, or ten times in a row
    afterwards. `failure` raises ServiceFailed if any process is given up before `mark_ready`, or the last of its kind
    (router, prefill, decode, redis) afterwards.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        start_child: Start,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        self._specs = specs
        self._start_child = start_child
        self._report = report
        self._clock = clock
        self._backoff = backoff
        self._children: dict[str, ChildProcess] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()
        self._given_up: set[str] = set()
        self._ready = False
        self.was_forced = False
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        for spec in self._specs:
            self._tasks[spec.name] = asyncio.create_task(self._keep_running(spec), name=spec.name)

    def mark_ready(self) -> None:
        self._ready = True

    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    async def stop(self) -> None:
        """Stop routers, then workers, then Redis: SIGTERM, and SIGKILL after the grace period."""
        self._stopping.set()
        for stage in Stage:
            specs = [spec for spec in self._specs if spec.stage is stage]
            for spec in specs:
                self._send(spec.name, signal.SIGTERM)
            await asyncio.gather(*(self._ended(spec) for spec in specs))
        if not self.failure.cancel() and not self.failure.cancelled():
            # Retrieve a failure during the stop, so that asyncio does not log it.
            self.failure.exception()

    def send_to(self, stage: Stage, number: signal.Signals) -> None:
        """Send a signal to the processes of one stage."""
        for spec in self._specs:
            if spec.stage is stage:
                self._send(spec.name, number)

    def force(self) -> None:
        """Kill all processes; a `stop` in progress then returns immediately."""
        self.was_forced = True
        self._stopping.set()
        for name in list(self._children):
            self._send(name, signal.SIGKILL)

    async def _ended(self, spec: ProcessSpec) -> None:
        task = self._tasks.get(spec.name)
        if task is None:
            return
        _, running = await asyncio.wait([task], timeout=spec.grace_s)
        if running:
            self._report(f"{spec.name} did not exit within {spec.grace_s:g} s; killing it")
            self._send(spec.name, signal.SIGKILL)
        await task

    async def _keep_running(self, spec: ProcessSpec) -> None:
        backoff = self._backoff()
        while not self._stopping.is_set():
            started = self._clock()
            ending = await self._run_once(spec)
            if self._stopping.is_set():
                return
            delay_s = backoff.delay_after(self._clock() - started)
            if self._is_hopeless(ending, backoff):
                self._give_up(spec, ending, backoff.deaths)
                return
            self._report(f"{spec.name} {ending.text}; restarting it in {delay_s:g} s")
            await self._pause(delay_s)

    async def _run_once(self, spec: ProcessSpec) -> Ending:
        try:
            child = await self._start_child(spec)
        except OSError as error:
            return Ending(None, f"cannot be started: {error}")
        self._children[spec.name] = child
        if self._stopping.is_set():
            # `stop` ran during the start and found no child to signal.
            child.send(signal.SIGTERM)
        try:
            code = await child.wait()
        finally:
            del self._children[spec.name]
        return Ending(code, describe_exit(code), tuple(child.tail))

    def _is_hopeless(self, ending: Ending, backoff: Backoff) -> bool:
        limit = backoff.max_deaths if self._ready else MAX_EARLY_DEATHS
        return ending.code in FINAL or backoff.deaths >= limit

    def _give_up(self, spec: ProcessSpec, ending: Ending, deaths: int) -> None:
        self._given_up.add(spec.name)
        often = f", {deaths} times in a row" if deaths > 1 else ""
        message = f"{spec.name} {ending.text}{often}; not restarting it"
        left = [each for each in self._specs if each.kind == spec.kind and each.name not in self._given_up]
        if self._ready and left:
            self._report(message)
        elif not self.failure.done():
            self.failure.set_exception(ServiceFailed(message, ending.tail))

    async def _pause(self, delay_s: float) -> None:
        # A stop ends the wait early.
        try:
            await asyncio.wait_for(self._stopping.wait(), delay_s)
        except TimeoutError:
            return

    def _send(self, name: str, number: signal.Signals) -> None:
        child = self._children.get(name)
        if child is not None:
            child.send(number)
