"""One peer in a process of its own: converted, loaded once, asked for a round at a time, stopped in between."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton import child_environment
from baton.benchmarks.peers.known import Form, Peer, Precision, conversion_command, converted_path
from baton.launch.paths import ROOT

LOADING_S, ROUND_S, ENDING_S = 900.0, 900.0, 5.0
ERROR_LINES = 3
CHILD = ROOT / "launch" / "child.py"


class PeerFailed(Exception):
    """It did not load, ended, or took too long; the message names which, with the end of its output."""


@dataclass(frozen=True, slots=True)
class Work:
    """As benchmarks/peers/lines.py reads it."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    seed: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Measured:
    prefill_s: float
    decode_step_s: float  # median of a round
    first_tokens: tuple[int, ...]


class PeerProcess:
    """A group of processes that takes no time of the CPU but during `measure`: idle threads of some engines spin."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], cores: Sequence[int], log: Path) -> None:
        """Starts loading. Raises: PeerFailed."""
        self._log = log
        dying_with_us = [sys.executable, "-I", "-S", str(CHILD), str(os.getpid()), ",".join(map(str, cores))]
        with log.open("wb") as stderr:
            try:
                self._process = subprocess.Popen(
                    [*dying_with_us, *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    cwd=ROOT,
                    env={**child_environment(), **environment},
                    start_new_session=True,
                )
            except OSError as error:
                raise PeerFailed(str(error)) from error
        self._unread = b""
        with ExitStack() as unless_it_loads:
            unless_it_loads.callback(self.close)
            self.version = str(self._answer(LOADING_S)["version"])
            self._signal(signal.SIGSTOP)
            unless_it_loads.pop_all()

    def measure(self, work: Work, limit_s: float = ROUND_S) -> Measured:
        """Raises: PeerFailed."""
        self._signal(signal.SIGCONT)
        stdin = self._process.stdin
        if stdin is None:
            raise PeerFailed("its input is closed")
        try:
            stdin.write(json.dumps(asdict(work)).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError as error:
            raise PeerFailed(self._told("ended")) from error
        answer = self._answer(limit_s)
        self._signal(signal.SIGSTOP)
        return Measured(answer["prefill_s"], answer["decode_step_s"], tuple(answer["first_tokens"]))

    def close(self) -> None:
        """Kills it: it holds nothing that would be lost."""
        self._signal(signal.SIGKILL)
        self._process.wait(ENDING_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _answer(self, limit_s: float) -> dict[str, Any]:
        stdout = self._process.stdout
        if stdout is None:
            raise PeerFailed("its output is closed")
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise PeerFailed(self._told(f"no answer within {limit_s:.0f} s"))
            got = os.read(stdout.fileno(), 1 << 16)
            if not got:
                raise PeerFailed(self._told("ended"))
            self._unread += got
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise PeerFailed(self._told(f"answered {line[:80]!r}")) from error
        if not isinstance(answer, dict):
            raise PeerFailed(self._told(f"answered {line[:80]!r}"))
        return answer

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:  # it has ended; the caller that waits for an answer finds out
            return

    def _told(self, what: str) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return ": ".join([what, *deque((line.strip() for line in lines if line.strip()), maxlen=ERROR_LINES)])


CONVERSION_S = 1800.0


@dataclass(frozen=True, slots=True)
class Room:
    """The load that an engine is to be made for."""

    checkpoint: Path
    folder: Path  # of environments and converted checkpoints
    logs: Path
    threads: int
    batch: int  # sequences at once, at most
    tokens: int  # of a sequence, at most


def start_peer(peer: Peer, precision: Precision, python: str, room: Room, note: Callable[[str], None]) -> PeerProcess:
    """Raises: PeerFailed."""
    source = _converted(peer, precision, python, room, note)
    note(f"loading {peer.name} {precision}")
    sizes = map(str, (room.threads, precision, room.batch, room.tokens))
    return PeerProcess(
        [python, "-m", f"baton.benchmarks.peers.{peer.driver}", str(source), *sizes],
        {"OMP_NUM_THREADS": str(room.threads), "HF_HUB_OFFLINE": "1"},
        sorted(os.sched_getaffinity(0))[: room.threads],
        room.logs / f"{peer.name}-{precision}.log",
    )


def _converted(peer: Peer, precision: Precision, python: str, room: Room, note: Callable[[str], None]) -> Path:
    """Raises: PeerFailed."""
    output = converted_path(peer, precision, room.checkpoint, room.folder)
    if peer.form is Form.CHECKPOINT or output.exists():
        return output
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f"partial-{output.name}")
    note(f"converting {room.checkpoint.name} for {peer.name} {precision}")
    command = conversion_command(peer, precision, python, room.checkpoint, partial)
    environment = {**child_environment(), "HF_HUB_OFFLINE": "1"}
    try:
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True, timeout=CONVERSION_S)
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().splitlines()[-ERROR_LINES:]
        raise PeerFailed(": ".join(["its converter failed", *last])) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerFailed(str(error)) from error
    return partial.rename(output)
