"""Keeps a set of processes running: restarts those that die, with back-off, and stops all in order."""

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
    """A process that the service needs cannot be kept running; the message is for people."""

    def __init__(self, message: str, tail: Sequence[str] = ()) -> None:
        """Create the error. `tail`: the last lines of the process's output."""
        super().__init__(message)
        self.tail = tuple(tail)


class Ending(NamedTuple):
    """End of one process life. `code` is None if it never started."""

    code: int | None
    text: str
    tail: Sequence[str] = ()


REASONS: Mapping[int, str] = {
    ExitCode.WRONG_CONFIGURATION: "its configuration or model cannot be used",
    ExitCode.STALLED: "it made no progress",
    ExitCode.CANNOT_LISTEN: "it cannot listen on its address",
    ExitCode.OUT_OF_MEMORY: "it has no memory left",
}


def describe_exit(code: int) -> str:
    """1 -> `ended with exit code 1`; -9 -> `was ended by SIGKILL`."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" + (f": {REASONS[code]}" if code in REASONS else "")


class Supervisor:
    """Owns every child from `start` to the end of `stop`.

    A process is given up, not restarted, when its exit code is final, when it dies for the third time before
    `mark_ready`, or too often in a row afterwards. `failure` ends with ServiceFailed when the last one of its kind
    (router, prefill, decode, redis) is given up, or any before `mark_ready`.
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
        """Router, workers, Redis: each gets SIGTERM and its grace, then SIGKILL."""
        self._stopping.set()
        for stage in Stage:
            specs = [spec for spec in self._specs if spec.stage is stage]
            for spec in specs:
                self._send(spec.name, signal.SIGTERM)
            await asyncio.gather(*(self._ended(spec) for spec in specs))
        if not self.failure.cancel() and not self.failure.cancelled():
            # It failed while it was being stopped: that is no longer awaited, so it must not be reported as lost.
            self.failure.exception()

    def send_to(self, stage: Stage, number: signal.Signals) -> None:
        """A signal to the processes of one stage."""
        for spec in self._specs:
            if spec.stage is stage:
                self._send(spec.name, number)

    def force(self) -> None:
        """Kills everything at once; a `stop` under way then ends at once too."""
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
            self._report(f"{spec.name} did not end within {spec.grace_s:g} s; killing it")
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
            return Ending(None, f"could not be started: {error}")
        self._children[spec.name] = child
        if self._stopping.is_set():
            # `stop` came while it was being made and found no one to send a signal to.
            child.send(signal.SIGTERM)
        try:
            code = await child.wait()
        finally:
            del self._children[spec.name]
        return Ending(code, describe_exit(code), tuple(child.tail))

    def _is_hopeless(self, ending: Ending, backoff: Backoff) -> bool:
        most = backoff.most_deaths if self._ready else MAX_EARLY_DEATHS
        return ending.code in FINAL or backoff.deaths >= most

    def _give_up(self, spec: ProcessSpec, ending: Ending, deaths: int) -> None:
        self._given_up.add(spec.name)
        often = f", {deaths} times in a row" if deaths > 1 else ""
        message = f"{spec.name} {ending.text}{often}; it is not started again"
        left = [each for each in self._specs if each.kind == spec.kind and each.name not in self._given_up]
        if self._ready and left:
            self._report(message)
        elif not self.failure.done():
            self.failure.set_exception(ServiceFailed(message, ending.tail))

    async def _pause(self, delay_s: float) -> None:
        # Ends early when stopping: that is all this wait is bounded by besides the delay.
        try:
            await asyncio.wait_for(self._stopping.wait(), delay_s)
        except TimeoutError:
            return

    def _send(self, name: str, number: signal.Signals) -> None:
        child = self._children.get(name)
        if child is not None:
            child.send(number)
