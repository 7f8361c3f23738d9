"""Helper processes for work that would block an event loop: one question at a time, with bounds on its cost.

The bounds are CPU time, memory and wall time. If a question exceeds CPU time or memory, a retry would too. Wall time
also depends on other work of the machine, so a retry may succeed.

Threads do not suffice, because long work such as parsing holds the GIL.

    answer = await Helper("baton.router.http.parse_process").ask([b"..."])     # in the process with the event loop
    sys.exit(answer_frames(answer))                                        # in the `__main__` of that module

Questions and answers are frames (8 bytes of length, little-endian, then the content) over a socket that is the
helper's standard input. First, the helper sends one frame: empty, or the reason why it cannot answer questions.
"""

import asyncio
import logging
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto
from pathlib import Path
from typing import Protocol

from baton import child_environment
from baton.process.serving.signals import leave_signals_to_parent

LIMIT_S = 20.0  # maximum wall time of one question
START_S = 60.0  # maximum time for starting a process, on a busy machine
MAX_WAITING_BYTES = 64 << 20
NICENESS = 10  # nice value of helper processes, whose work yields to requests that wait for a token
MORE_MEMORY_BYTES = 1 << 30  # address space of a helper process in addition to that at its start
_LENGTH_BYTES = 8
_STOP_S = 1.0
_NO_MEMORY_EXIT = 12  # exit code after a MemoryError

logger = logging.getLogger(__name__)

Buffer = bytes | bytearray | memoryview


class Failure(Enum):
    """Reason why a question has no answer."""

    CPU = auto()  # CPU time exceeded
    MEMORY = auto()  # memory exceeded by the first question that a process got
    CRASH = auto()  # the process ended by an exception or a fault
    WALL = auto()  # wall time exceeded
    LOST = auto()  # the process was killed from outside, or closed

    @property
    def is_of_question(self) -> bool:
        """Return whether the same question would fail again."""
        return self in (Failure.CPU, Failure.MEMORY, Failure.CRASH)


class HelperFailed(RuntimeError):
    """Error: a helper process gave no answer. `failure`: reason."""

    def __init__(self, message: str = "", failure: Failure = Failure.LOST) -> None:
        super().__init__(message)
        self.failure = failure


class HelperNotStarted(HelperFailed):
    """Error: the process does not start. `fault`: reason from the process; empty if it sent none."""

    def __init__(self, module: str, fault: str = "") -> None:
        super().__init__(f"{module} does not start" + (f": {fault}" if fault else ""))
        self.fault = fault


class HelperBusy(RuntimeError):
    """Error: the queue of questions is full."""


class Asks(Protocol):
    """Interface for questions to helper processes, implemented by `Helper`."""

    async def ask(self, parts: Sequence[Buffer]) -> bytearray: ...

    def close(self) -> None: ...


class Helper:
    """Pool of helper processes of one kind; another one starts when the running ones are busy. Close it after use."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        processes: int = 1,
        limit_s: float = LIMIT_S,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        """Create a pool without starting processes. `limit_s`: wall time of one question, without the start of a
        process.
        """
        self.processes = tuple(HelperProcess(module, *arguments) for _ in range(processes))
        self.limit_s = limit_s
        self._idle = queue.LifoQueue[HelperProcess]()
        for process in reversed(self.processes):
            self._idle.put(process)
        self._max_waiting_bytes = max_waiting_bytes
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix=module)
        self.waiting_bytes = 0

    async def ask(self, parts: Sequence[Buffer]) -> bytearray:
        """Return the answer to one question, whose frame is given in parts. Raises: HelperFailed, HelperBusy."""
        size = sum(map(len, parts))
        if self.waiting_bytes + size > self._max_waiting_bytes:
            raise HelperBusy(f"{self.waiting_bytes} bytes of {self._max_waiting_bytes} are queued already")
        self.waiting_bytes += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self.ask_here, parts)
        finally:
            self.waiting_bytes -= size

    def ask_here(self, parts: Sequence[Buffer]) -> bytearray:
        """Wait for the answer to one question on the calling thread, and return it. Raises: HelperFailed."""
        process = self._idle.get()
        try:
            return process.ask(parts, self.limit_s)
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """End the processes; running questions fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self.processes:
            process.close()


class HelperProcess:
    """Helper process, started by its first question and again after a failure. Only one thread at a time may call
    `ask`; any thread may call `close`.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        """Create a process without starting it. `module` is run with these arguments and calls `answer_frames`."""
        self._module = module
        self._arguments = arguments
        self._answered = 0  # number of questions that the running process has answered
        self._running: _Running | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        return None if self._running is None else self._running.popen.pid

    def ask(self, parts: Sequence[Buffer], limit_s: float) -> bytearray:
        """Return the answer to one question, within `limit_s` of wall time once the process has started.

        Raises: HelperFailed.
        """
        if self._closed:
            raise HelperFailed(f"{self._module}: the helper process was closed")
        ours = self._running.ours if self._running is not None else self._start()
        deadline_s = time.monotonic() + limit_s
        try:
            _send(ours, parts, deadline_s)
            answer = _receive(ours, deadline_s)
        except TimeoutError as error:
            self._end()
            raise HelperFailed(f"{self._module}: timeout after {limit_s:g} s", Failure.WALL) from error
        except (OSError, EOFError) as error:
            answered, failure = self._answered, _failure(self._end(_STOP_S))
            if failure is Failure.MEMORY and answered:  # filled by earlier questions: retry in a new process
                return self.ask(parts, limit_s)
            raise HelperFailed(f"{self._module}: {failure.name}: {error or type(error).__name__}", failure) from error
        self._answered += 1
        return answer

    def close(self) -> None:
        self._closed = True
        self._end()

    def _start(self) -> socket.socket:
        """Start the process. Raises: HelperNotStarted."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                popen = subprocess.Popen(
                    [sys.executable, "-P", "-m", self._module, *self._arguments],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=child_environment(),
                    start_new_session=True,
                )
            self._running, self._answered = _Running(popen, ours), 0
            weakref.finalize(self, self._running.end)  # ends the process when its owner or the interpreter ends
            fault = _receive(ours, time.monotonic() + START_S).decode()
        except (OSError, EOFError) as error:
            self._end()
            ours.close()
            raise HelperNotStarted(self._module) from error
        if fault:
            self._end()
            raise HelperNotStarted(self._module, fault)
        return ours

    def _end(self, patience_s: float = 0.0) -> int | None:
        """End the process, after waiting `patience_s` for its exit. Return its exit code."""
        running, self._running = self._running, None
        return None if running is None else running.end(patience_s)


class _Running:
    """Running helper process, and the parent's end of the socket."""

    def __init__(self, popen: subprocess.Popen[bytes], ours: socket.socket) -> None:
        self.popen = popen
        self.ours = ours

    def end(self, patience_s: float = 0.0) -> int | None:
        """End the process; return its exit code, None if it was killed and has not exited yet."""
        try:
            self.popen.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            try:
                self.popen.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                logger.warning("helper process %d still exists %g s after SIGKILL", self.popen.pid, _STOP_S)
        self.ours.close()
        return self.popen.returncode


def _failure(exit_code: int | None) -> Failure:
    """Return the reason why a process exited instead of answering."""
    match exit_code:
        case _ if exit_code == -signal.SIGPROF:
            return Failure.CPU
        case _ if exit_code in (_NO_MEMORY_EXIT, -signal.SIGABRT):  # Rust and C++ abort when an allocation fails
            return Failure.MEMORY
        case _ if exit_code in (1, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE):
            return Failure.CRASH
    return Failure.LOST


def answer_frames(
    answer: Callable[[memoryview], Sequence[Buffer]],
    *,
    fault: str = "",
    niceness: int = NICENESS,
    cpu_s: float = LIMIT_S,
    memory_bytes: int = MORE_MEMORY_BYTES,
) -> int:
    """Answer questions until standard input ends; return the exit code. Runs in the helper process.

    If `answer` raises an exception, the process ends and the question fails. `cpu_s`: CPU time per question, of all
    threads. `memory_bytes`: address space in addition to that at the start. `fault`: reason why the process cannot
    answer questions; the parent gets it, and the process ends.
    """
    leave_signals_to_parent()
    os.nice(niceness)
    _limit_memory(memory_bytes)
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as parent:
        _send(parent, [fault.encode(errors="replace")])
        try:
            while not fault:
                asked = memoryview(_receive(parent))
                signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends the process, also inside C code
                answered = answer(asked)
                signal.setitimer(signal.ITIMER_PROF, 0.0)
                _send(parent, answered)
        except EOFError:
            return 0
        except MemoryError:
            os._exit(_NO_MEMORY_EXIT)  # a normal exit needs memory
    return 1


def _send(connection: socket.socket, parts: Sequence[Buffer], deadline_s: float | None = None) -> None:
    """Send one frame without copying its parts. Raises: TimeoutError, OSError."""
    for part in (sum(map(len, parts)).to_bytes(_LENGTH_BYTES, "little"), *parts):
        connection.settimeout(_left(deadline_s))
        connection.sendall(part)


def _receive(connection: socket.socket, deadline_s: float | None = None) -> bytearray:
    """Receive one frame. Raises: TimeoutError, EOFError, OSError."""
    length = _read(connection, _LENGTH_BYTES, deadline_s)
    return _read(connection, int.from_bytes(length, "little"), deadline_s)


def _read(connection: socket.socket, size: int, deadline_s: float | None) -> bytearray:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        connection.settimeout(_left(deadline_s))
        read = connection.recv_into(rest)
        if not read:
            raise EOFError("the connection was closed")
        rest = rest[read:]
    return data


def _left(deadline_s: float | None) -> float | None:
    left_s = None if deadline_s is None else deadline_s - time.monotonic()
    if left_s is not None and left_s <= 0:
        raise TimeoutError("timeout")
    return left_s


def _limit_memory(more_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    most = pages * os.sysconf("SC_PAGE_SIZE") + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
