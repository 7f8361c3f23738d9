"""Work that would hold an event loop, in a process of its own: one task at a time, in bounds of time and memory.

Threads do not suffice: most of the long work (parsing) keeps the interpreter's lock.

    answer = await Helper("baton.gateway.parse_process").ask([b"..."])               where the work comes up
    sys.exit(answer_frames(answer))                                                  in the `__main__` of that module

Questions and answers are frames, a length of 8 bytes, little-endian, and so many bytes, over a socket that is the
process's standard input. The first frame is the process's: empty, or why it cannot work.
"""

import asyncio
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from baton import child_environment

LIMIT_S = 20.0  # for one question
START_S = 60.0  # of a process on a busy machine
MAX_WAITING_BYTES = 64 << 20
NICENESS = 10  # a client that waits for one token comes before one that sent megabytes
MORE_MEMORY_BYTES = 1 << 30  # of address space, beyond that at the start
_LENGTH_BYTES = 8
_STOP_S = 1.0

Buffer = bytes | bytearray | memoryview


class HelperFailed(RuntimeError):
    """The process ended or took too long; it gave no answer to the question."""


class HelperSlow(HelperFailed):
    """It took too long."""


class HelperNotStarted(HelperFailed):
    """`fault`: why it cannot work, in its own words; empty where it did not come so far."""

    def __init__(self, module: str, fault: str = "") -> None:
        super().__init__(f"{module} does not start" + (f": {fault}" if fault else ""))
        self.fault = fault


class HelperBusy(RuntimeError):
    """Too many wait already."""


class Asks(Protocol):
    """The interface of a Helper."""

    async def ask(self, parts: Sequence[Buffer]) -> bytearray: ...

    def close(self) -> None: ...


class Helper:
    """One process, for an event loop. To be closed."""

    def __init__(self, module: str, limit_s: float = LIMIT_S, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._process = HelperProcess(module)
        self._limit_s = limit_s
        self._max_waiting_bytes = max_waiting_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=module)
        self.waiting_bytes = 0

    async def ask(self, parts: Sequence[Buffer]) -> bytearray:
        """The answer to one frame of these parts. Raises: HelperFailed, HelperBusy."""
        size = sum(map(len, parts))
        if self.waiting_bytes + size > self._max_waiting_bytes:
            raise HelperBusy(f"{self.waiting_bytes} bytes wait already")
        self.waiting_bytes += size
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, self._process.ask, parts, self._limit_s
            )
        finally:
            self.waiting_bytes -= size

    def close(self) -> None:
        """Ends the process; its present task fails."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._process.close()


class HelperProcess:
    """Started when it is first asked, and anew after a failure. Asked by one thread at a time, closed by any."""

    def __init__(self, module: str, *arguments: str) -> None:
        """`module` is run with these arguments and calls `answer_frames`."""
        self._module = module
        self._arguments = arguments
        self._running: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        return None if self._running is None else self._running[0].pid

    def ask(self, parts: Sequence[Buffer], limit_s: float) -> bytearray:
        """The answer to one frame of these parts, within `limit_s` once it has started. Raises: HelperFailed."""
        if self._closed:
            raise HelperFailed("closed")
        ours = self._running[1] if self._running is not None else self._start()
        deadline_s = time.monotonic() + limit_s
        try:
            _send(ours, parts, deadline_s)
            return _receive(ours, deadline_s)
        except (OSError, EOFError) as error:
            self._end()
            kind = HelperSlow if isinstance(error, TimeoutError) else HelperFailed
            raise kind(f"{self._module}: {error or type(error).__name__}") from error

    def close(self) -> None:
        self._closed = True
        self._end()

    def _start(self) -> socket.socket:
        """Raises: HelperNotStarted."""
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
            self._running = popen, ours
            fault = _receive(ours, time.monotonic() + START_S).decode()
        except (OSError, EOFError) as error:
            self._end()
            raise HelperNotStarted(self._module) from error
        if fault:
            self._end()
            raise HelperNotStarted(self._module, fault)
        return ours

    def _end(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        popen, ours = running
        popen.kill()
        popen.wait(_STOP_S)
        ours.close()


def answer_frames(
    answer: Callable[[memoryview], Sequence[Buffer]],
    *,
    fault: str = "",
    niceness: int = NICENESS,
    memory_bytes: int = MORE_MEMORY_BYTES,
) -> int:
    """The inside of the process: answers frames until its standard input ends. Returns the exit code.

    An exception from `answer` ends the process, and so the caller's request fails. `memory_bytes`: of address space,
    beyond that at this moment. With a `fault` it only reports that.
    """
    os.nice(niceness)
    _limit_memory(memory_bytes)
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as parent:
        _send(parent, [fault.encode()])
        try:
            while not fault:
                _send(parent, answer(memoryview(_receive(parent))))
        except EOFError:
            return 0
    return 1


def _send(connection: socket.socket, parts: Sequence[Buffer], deadline_s: float | None = None) -> None:
    """One frame, its parts copied nowhere. Raises: TimeoutError, OSError."""
    for part in (sum(map(len, parts)).to_bytes(_LENGTH_BYTES, "little"), *parts):
        connection.settimeout(_left(deadline_s))
        connection.sendall(part)


def _receive(connection: socket.socket, deadline_s: float | None = None) -> bytearray:
    """One frame. Raises: TimeoutError, EOFError, OSError."""
    length = _read(connection, _LENGTH_BYTES, deadline_s)
    return _read(connection, int.from_bytes(length, "little"), deadline_s)


def _read(connection: socket.socket, size: int, deadline_s: float | None) -> bytearray:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        connection.settimeout(_left(deadline_s))
        read = connection.recv_into(rest)
        if not read:
            raise EOFError("it ended")
        rest = rest[read:]
    return data


def _left(deadline_s: float | None) -> float | None:
    left_s = None if deadline_s is None else deadline_s - time.monotonic()
    if left_s is not None and left_s <= 0:
        raise TimeoutError("it took too long")
    return left_s


def _limit_memory(more_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    most = pages * os.sysconf("SC_PAGE_SIZE") + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
