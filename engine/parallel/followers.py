"""The leader's side: starts the other ranks' processes, tells them every plan, and ends them."""

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from engine.model_config import ModelError
from engine.parallel import wire
from engine.parallel.collectives import RankLost
from engine.parallel.shard import Shard
from engine.plan import Plan

LOAD_TIMEOUT_S = 900.0  # of a follower that reads its part of a large checkpoint
STOP_TIMEOUT_S = 5.0
Loaded = TypeVar("Loaded")


@dataclass(frozen=True, slots=True)
class FollowerStart:
    """What a follower needs to know; plain values, since it travels as JSON."""

    folder: str
    device: str  # of the leader; that of rank r is r places further, where devices have numbers
    dtype: str  # a key of DTYPES
    quantize: str
    kv_dtype: str  # a key of KV_DTYPES
    block_tokens: int
    total_blocks: int
    host_slots: int
    degree: int
    storage_fd: int | None  # of all ranks' parts of the pool, one after the other; None: each makes its own
    cores: tuple[int, ...] | None  # of the whole worker
    rank: int = 0
    meeting: str = ""  # path where the ranks find each other


class Followers:
    """Ranks 1 and up, each a process and a socket to it. To be closed; they also end when this process does."""

    def __init__(self, start: FollowerStart) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="baton-ranks-")
        self._start = replace(start, meeting=str(Path(self._folder.name) / "meeting"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []

    def load(self, load_own: Callable[[Path], Loaded]) -> Loaded:
        """Loads every rank's part at once, the leader's by `load_own`, which is given the place to meet.

        Raises: ModelError with what a follower said, RankLost.
        """
        with ExitStack() as undo:
            undo.callback(self.close)
            for rank in range(1, self._start.degree):
                self._spawn(replace(self._start, rank=rank))
            loaded = load_own(Path(self._start.meeting))
            deadline = time.monotonic() + LOAD_TIMEOUT_S
            for rank, connection in enumerate(self._connections, start=1):
                self._wait_ready(rank, connection, deadline)
            undo.pop_all()
        return loaded

    def carry_out(self, plan: Plan) -> None:
        """Tells all of them to compute their part. Raises: RankLost."""
        self._tell(wire.PLAN, wire.plan_bytes(plan))

    def announce_logits(self, rows: int) -> None:
        """Raises: RankLost."""
        self._tell(wire.LOGITS, rows.to_bytes(8, "little"))

    def close(self) -> None:
        """They end when their connection does; one that does not is killed."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._connections, self._processes = [], []
        self._folder.cleanup()

    @property
    def process_ids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def _spawn(self, start: FollowerStart) -> None:
        ours, theirs = socket.socketpair()
        passed = [theirs.fileno(), *([] if start.storage_fd is None else [start.storage_fd])]
        with theirs:
            command = [sys.executable, "-m", "engine.parallel.follower", str(theirs.fileno())]
            self._processes.append(subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL))
        self._connections.append(ours)
        wire.send(ours, wire.START, json.dumps(asdict(start)).encode())

    def _wait_ready(self, rank: int, connection: socket.socket, deadline: float) -> None:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            frame = wire.receive(connection)
        except (wire.Closed, TimeoutError) as error:
            raise RankLost(f"rank {rank} did not load its part of the model: {error}") from error
        connection.settimeout(None)
        if frame.kind == wire.FAILED:
            raise ModelError(f"rank {rank}: {frame.payload.decode()}")

    def _tell(self, kind: int, payload: bytes) -> None:
        for rank, connection in enumerate(self._connections, start=1):
            try:
                wire.send(connection, kind, payload)
            except wire.Closed as error:
                raise RankLost(f"rank {rank} is gone: {error}") from error


def cores_of(shard: Shard, cores: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """This rank's share of the worker's cores: as even as can be, and at least one."""
    if cores is None:
        return None
    share = tuple(cores[place] for place in shard.vocabulary(len(cores)))
    return share or (cores[shard.rank % len(cores)],)
