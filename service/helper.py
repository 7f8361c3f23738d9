"""A process that does the work that would hold an event loop: one task at a time, in bounds of time and memory.

Threads do not suffice: most of the long work (parsing) keeps the interpreter's lock.
"""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from baton import child_environment
from baton.service.helper_loop import LENGTH_BYTES, Buffer, frame

LIMIT_S = 20.0  # for one question
START_S = 60.0  # more, for the first one, on a busy machine
MAX_WAITING_BYTES = 64 << 20
_STOP_S = 1.0


class HelperFailed(RuntimeError):
    """The process ended or took too long; it gave no answer to the question."""


class HelperBusy(RuntimeError):
    """Too many wait already."""


class Asks(Protocol):
    """The interface of a Helper."""

    async def ask(self, parts: Sequence[Buffer]) -> bytearray: ...

    def close(self) -> None: ...


class Helper:
    """One process, started when it is first needed. To be closed."""

    def __init__(self, module: str, limit_s: float = LIMIT_S, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        """`module` is run and calls `answer_frames`."""
        self._process = _Process(module)
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


class _Process:
    """Asked by one thread at a time, closed by any."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._running: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._closed = False

    def ask(self, parts: Sequence[Buffer], limit_s: float) -> bytearray:
        """Raises: HelperFailed."""
        if self._closed:
            raise HelperFailed("closed")
        try:
            if self._running is None:
                limit_s += START_S
            _, ours = self._running or self._start()
            return _ask(ours, parts, time.monotonic() + limit_s)
        except (OSError, EOFError) as error:  # TimeoutError is an OSError
            self._end()
            raise HelperFailed(f"{self._module}: {error or type(error).__name__}") from error

    def close(self) -> None:
        self._closed = True
        self._end()

    def _start(self) -> "tuple[subprocess.Popen[bytes], socket.socket]":
        """Raises: OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            popen = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=child_environment(),
                start_new_session=True,
            )
        self._running = popen, ours
        return self._running

    def _end(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        popen, ours = running
        popen.kill()
        popen.wait(_STOP_S)
        ours.close()


def _ask(ours: socket.socket, parts: Sequence[Buffer], deadline_s: float) -> bytearray:
    """Raises: TimeoutError, EOFError, OSError."""
    for part in frame(parts):
        ours.settimeout(_left(deadline_s))
        ours.sendall(part)
    size = int.from_bytes(_read(ours, LENGTH_BYTES, deadline_s), "little")
    return _read(ours, size, deadline_s)


def _read(ours: socket.socket, size: int, deadline_s: float) -> bytearray:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        ours.settimeout(_left(deadline_s))
        read = ours.recv_into(rest)
        if not read:
            raise EOFError("it ended")
        rest = rest[read:]
    return data


def _left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("it took too long")
    return left_s
