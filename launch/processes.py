"""Child processes: they die with their parent, their output is forwarded, and restarts are delayed."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TextIO

from baton.launch.log_files import LineSink, TeeWriter


@dataclass(slots=True)
class Backoff:
    """Delay before a restart: 0.2 s after the first death, doubled after each further one, at most 10 s. A process
    that lived for 30 s restarts after 0.2 s again.
    """

    first_s: float = 0.2
    longest_s: float = 10.0
    healthy_after_s: float = 30.0
    max_deaths: float = 10  # consecutive deaths after which the process is given up
    deaths: int = 0

    def delay_after(self, lived_s: float) -> float:
        if lived_s >= self.healthy_after_s:
            self.deaths = 0
        # The bound keeps the power within a float's range after days of deaths.
        delay_s = min(self.longest_s, self.first_s * 2.0 ** min(self.deaths, 32))
        self.deaths += 1
        return delay_s


OUTPUT_DRAIN_S = 1.0
TAIL_LINES = 12
CHUNK_BYTES = 65536


class Stage(IntEnum):
    """Stage of a stop. Stages follow in ascending order: a process stops before the processes that it uses."""

    ROUTER = 0
    WORKER = 1
    REDIS = 2


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Process to run. `grace_s`: seconds between SIGTERM and SIGKILL."""

    name: str
    command: tuple[str, ...]
    stage: Stage
    grace_s: float
    environment: Mapping[str, str]  # complete environment: nothing is inherited
    cores: tuple[int, ...] = ()  # cores to which the process is pinned; empty: it is not pinned
    noise: tuple[str, ...] = ()  # texts whose lines are dropped from the output
    stdin: bytes = field(default=b"", repr=False)  # may contain secrets; at most 64 KiB, which a pipe buffers

    @property
    def kind(self) -> str:
        """Return the name without a number."""
        return self.name.rpartition("-")[0] or self.name


COLOURS = {"WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31m"}
NAME, PLAIN = "\x1b[2m", "\x1b[0m"
_LOG_LINE = re.compile(
    r"(?P<name>\S+ *) \| (?P<time>\d\d:\d\d:\d\d)\.\d{3} (?P<level>[A-Z]+) \S+ [\w.]+: (?P<message>.*?)"
    r"(?: trace_id=\w+)?(?: request_id=\S+)?"
)


def shortened(line: str, columns: int, colours: bool) -> str:
    """Shorten `router    | 12:00:00.123 INFO router baton.x: text` to `12:00:00 router    text`, cut at `columns`.

    Warnings and errors are not cut; lines of another format, such as those of `up`, are not changed.
    """
    found = _LOG_LINE.fullmatch(line)
    if found is None:
        return line
    level, name, message = found["level"], found["name"], found["message"]
    prefix = f"{found['time']} {name} "
    if level not in COLOURS and len(prefix) + len(message) > columns:
        message = message[: max(0, columns - len(prefix) - 1)] + "…"
    if not colours:
        return f"{prefix}{message}"
    return f"{NAME}{prefix}{PLAIN}{COLOURS.get(level, '')}{message}{PLAIN}"


def form_for(stream: TextIO) -> Callable[[str], str]:
    """Return the function that formats lines: short and coloured (unless NO_COLOR is set) at a terminal, else
    unchanged.
    """
    if not stream.isatty():
        return str
    colours = not os.environ.get("NO_COLOR")
    return lambda line: shortened(line, shutil.get_terminal_size().columns, colours)


class LineWriter:
    """Writer of many children's lines to one stream. Lines are dropped once the stream is closed."""

    def __init__(self, stream: TextIO, form: Callable[[str], str] = str) -> None:
        """Create a writer. `form` returns the text to write for a line."""
        self._stream = stream
        self._form = form
        self._closed = False

    def write(self, line: str) -> None:
        if self._closed:
            return
        try:
            self._stream.write(f"{self._form(line)}\n")
            self._stream.flush()
        except (BrokenPipeError, ValueError):
            self._closed = True


class Tail:
    """Buffer of the last lines of a process's output."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=TAIL_LINES)

    def write(self, line: str) -> None:
        self.lines.append(line)


class ChildProcess:
    """Running child, whose owner awaits `wait` exactly once."""

    def __init__(self, process: Process, pumps: list[asyncio.Task[None]], tail: "Tail") -> None:
        self._process = process
        self._pumps = pumps
        self._tail = tail

    @classmethod
    async def start(cls, spec: ProcessSpec, output: LineSink, errors: LineSink) -> "ChildProcess":
        """Start a child. Raises: OSError."""
        launcher = (sys.executable, "-I", "-S", str(Path(__file__).with_name("child.py")))
        with _readable(spec.stdin) as stdin:
            process = await asyncio.create_subprocess_exec(
                *launcher,
                str(os.getpid()),
                ",".join(map(str, spec.cores)),
                *spec.command,
                stdin=stdin,
                stdout=PIPE,
                stderr=PIPE,
                env=spec.environment,
                # A session of its own: Ctrl-C reaches only the supervisor, which stops its children in order.
                start_new_session=True,
            )
        tail = Tail()
        pumps = [
            asyncio.create_task(_pump(stream, spec, TeeWriter(writer, tail)))
            for stream, writer in ((process.stdout, output), (process.stderr, errors))
            if stream is not None
        ]
        return cls(process, pumps, tail)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def tail(self) -> tuple[str, ...]:
        """Return the last lines of the output."""
        return tuple(self._tail.lines)

    async def wait(self) -> int:
        """Return the exit code (negative for a signal) once the output has been forwarded."""
        code = await self._process.wait()
        # The wait is bounded, since a grandchild may keep the pipe open for ever.
        _, unfinished = await asyncio.wait(self._pumps, timeout=OUTPUT_DRAIN_S)
        for pump in unfinished:
            pump.cancel()
        return code

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the child has exited."""
        if self._process.returncode is None:
            # Process.send_signal would poll, and could take the exit code from asyncio's own watcher.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)


@contextlib.contextmanager
def _readable(content: bytes) -> Iterator[int]:
    """Open a pipe that yields `content`, then the end of the file."""
    reader, writer = os.pipe()
    try:
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(content)
        yield reader
    finally:
        os.close(reader)


async def _pump(stream: asyncio.StreamReader, spec: ProcessSpec, writer: LineSink) -> None:
    """Forward complete lines. Of a line that carriage returns redraw (a progress bar), forward the last state only."""
    rest = b""
    while chunk := await stream.read(CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        # Keep an unfinished line from its last redraw on, and split it at CHUNK_BYTES.
        rest = rest[rest.rfind(b"\r", 0, -1) + 1 :]
        if len(rest) > CHUNK_BYTES:
            lines, rest = [*lines, rest], b""
        for line in lines:
            _pass_on(line, spec, writer)
    if rest.strip():
        _pass_on(rest, spec, writer)


def _pass_on(line: bytes, spec: ProcessSpec, writer: LineSink) -> None:
    text = _last_state(line)
    if not any(noise in text for noise in spec.noise):
        writer.write(f"{spec.name:<9} | {text}")


def _last_state(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
