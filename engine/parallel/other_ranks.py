"""Leader's side of tensor parallelism: start the other ranks' processes, send them every plan, stop them."""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from baton import child_environment
from baton.engine.config.model_config import ModelError
from baton.engine.kv_cache.sizing import StepMemory
from baton.engine.parallel import wire
from baton.engine.parallel.collectives import TIMEOUT, RankLost
from baton.engine.parallel.shard import Shard
from baton.engine.parallel.wire import AdapterToAdd, RankOptions, RankPool, RankStart, StepToMeasure, WeightsToRead
from baton.engine.request import Plan

LOAD_TIMEOUT_S = 900.0  # for reading a part of a large checkpoint
ADAPTER_TIMEOUT_S = 60.0  # for reading an adapter, while steps wait
STOP_TIMEOUT_S = 5.0
EXIT_TIMEOUT_S = 1.0  # between the end of a process's connection and its exit
Made = TypeVar("Made")


class OtherRanks:
    """Ranks 1 and up, each a process with a socket. Must be closed; they also stop when this process does."""

    def __init__(self, start: RankStart) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="baton-ranks-")
        self._start = replace(start, meeting=str(Path(self._folder.name) / "meeting"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []
        self._closing = self._is_one_lost = False
        self.abort: Callable[[], None] = lambda: None
        """Releases own threads that wait for a lost rank."""

    def load(self, load_own: Callable[[Path], Made]) -> Made:
        """Load all ranks' parts in parallel, the leader's by `load_own`, which gets the meeting place.

        Raises: ModelError with a rank's message, RankLost.
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

    def measure(self, step: StepToMeasure) -> None:
        """Let all ranks compute a step over temporary blocks while the leader does. Raises: RankLost."""
        self._tell(wire.MEASURE, step.to_bytes())

    def memories(self) -> list[StepMemory]:
        """Return the memory of that step on each rank. Raises: RankLost."""
        self._tell(wire.MEMORY, b"")
        frames = [_receive(*pair, TIMEOUT.total_seconds()) for pair in enumerate(self._connections, start=1)]
        return [StepMemory(**json.loads(frame.payload)) for frame in frames]

    def lay_pool(self, pool: RankPool, options: RankOptions) -> None:
        """Give every rank its part of the pool. Raises: ModelError with a rank's message, RankLost."""
        deadline = time.monotonic() + LOAD_TIMEOUT_S
        for rank, connection in enumerate(self._connections, start=1):
            handle = options.part_handles[rank] if options.part_handles else None
            own = replace(pool, part_handle=handle, sends_fd=options.storage_fd is not None)
            with _lost(rank):
                wire.send(connection, wire.POOL, own.to_bytes())
                if options.storage_fd is not None:
                    wire.send_fd(connection, options.storage_fd)
        for rank, connection in enumerate(self._connections, start=1):
            self._wait_ready(rank, connection, deadline)

    def record(self, rows: int, blocks: int) -> None:
        """Let all ranks record decode steps while the leader does, since sums are recorded too."""
        self._tell(wire.RECORD, wire.SIZES.pack(rows, blocks))

    def carry_out(self, plan: Plan) -> None:
        """Let all ranks compute their part of a plan. Raises: RankLost."""
        self._tell(wire.PLAN, wire.plan_bytes(plan))

    def whole(self, results: Callable[[], Made]) -> Made:
        """Wait for the results of a step and check that no rank was lost. Raises: RankLost.

        On a GPU, `abort` completes exchanges with a lost rank without its part and without an error.
        """
        made = results()
        if self._is_one_lost:
            raise RankLost("a rank was lost; the results of this step may be incomplete")
        return made

    def wait_moved(self) -> None:
        """Wait until all ranks have moved the blocks of a plan without chunks, so without sums. Raises: RankLost."""
        for rank, connection in enumerate(self._connections, start=1):
            _receive(rank, connection, TIMEOUT.total_seconds())

    def add_adapter(self, adapter: AdapterToAdd, number: int) -> None:
        """Add an adapter under the leader's number on all ranks or none. Raises: ModelError with a rank's error;
        RankLost.
        """
        self._tell(wire.ADD_ADAPTER, adapter.to_bytes())
        self._check_added(ADAPTER_TIMEOUT_S, self.remove_adapter, number)

    def remove_adapter(self, number: int) -> None:
        """Remove an adapter on all ranks. Raises: RankLost."""
        self._tell(wire.REMOVE_ADAPTER, number.to_bytes(8, "little"))

    def read_weights(self, folder: str) -> None:
        """Let each rank read its part while it computes; an empty folder drops what was read. Raises: RankLost."""
        self._tell(wire.READ_WEIGHTS, WeightsToRead(folder).to_bytes())

    def add_weights(self, number: int) -> None:
        """Add the weights that all ranks have read under the leader's number, waiting for those still reading.

        Raises: ModelError with a rank's message if one fails, then none has them; RankLost.
        """
        self._tell(wire.ADD_WEIGHTS, number.to_bytes(8, "little"))
        self._check_added(LOAD_TIMEOUT_S, self.remove_weights, number)

    def remove_weights(self, number: int) -> None:
        """Remove weights on all ranks. Raises: RankLost."""
        self._tell(wire.REMOVE_WEIGHTS, number.to_bytes(8, "little"))

    def _check_added(self, timeout_s: float, remove: Callable[[int], None], number: int) -> None:
        answers = [_receive(*pair, timeout_s) for pair in enumerate(self._connections, start=1)]
        for rank, answer in enumerate(answers, start=1):
            if answer.kind == wire.FAILED:
                remove(number)
                raise ModelError(f"rank {rank}: {answer.payload.decode()}")

    def watch(self, on_lost: Callable[[RankLost], None]) -> None:
        """Call `on_lost` once, on its own thread, as soon as a rank stops unexpectedly."""
        threading.Thread(target=self._watch, args=(on_lost,), name="ranks", daemon=True).start()

    def announce_logits(self, rows: int) -> None:
        """Announce that the leader needs logits of `rows` rows. Raises: RankLost."""
        self._tell(wire.LOGITS, rows.to_bytes(8, "little"))

    def close(self) -> None:
        """Close the connections, which stops the ranks; kill those that do not stop in time."""
        self._closing = True
        for connection in self._connections:
            with contextlib.suppress(OSError):  # the other end is gone
                connection.shutdown(socket.SHUT_RDWR)
        for process in self._processes:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self._connections:
            connection.close()
        self._connections, self._processes = [], []
        self._folder.cleanup()

    @property
    def degree(self) -> int:
        """Number of ranks including the leader."""
        return self._start.degree

    @property
    def process_ids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def _spawn(self, start: RankStart) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", start.entry, str(theirs.fileno())]
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=child_environment(),
                process_group=0,  # Ctrl-C is for the leader, which may continue for a while
            )
            self._processes.append(process)
        self._connections.append(ours)
        wire.send(ours, wire.START, start.to_bytes())

    def _wait_ready(self, rank: int, connection: socket.socket, deadline: float) -> None:
        frame = _receive(rank, connection, max(0.001, deadline - time.monotonic()))
        if frame.kind == wire.FAILED:
            raise ModelError(f"rank {rank}: {frame.payload.decode()}")

    def _watch(self, on_lost: Callable[[RankLost], None]) -> None:
        poll = select.poll()
        ranks = {connection.fileno(): rank for rank, connection in enumerate(self._connections, start=1)}
        for descriptor in ranks:
            poll.register(descriptor, 0)  # hang-up is always reported
        descriptor, _ = poll.poll()[0]
        if self._closing:
            return
        self._is_one_lost = True  # before exchanges complete without it
        process = self._processes[ranks[descriptor] - 1]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_TIMEOUT_S)
        self.abort()
        on_lost(RankLost(f"rank {ranks[descriptor]}, process {process.pid}, ended: exit code {process.returncode}"))

    def _tell(self, kind: int, payload: bytes) -> None:
        for rank, connection in enumerate(self._connections, start=1):
            with _lost(rank):
                wire.send(connection, kind, payload)


@contextlib.contextmanager
def _lost(rank: int) -> Iterator[None]:
    try:
        yield
    except wire.Closed as error:
        raise RankLost(f"rank {rank} is gone: {error}") from error


def _receive(rank: int, connection: socket.socket, timeout_s: float) -> wire.Frame:
    connection.settimeout(timeout_s)
    try:
        return wire.receive(connection)
    except (wire.Closed, TimeoutError) as error:
        raise RankLost(f"rank {rank} did not answer: {error}") from error
    finally:
        connection.settimeout(None)


def cores_of(shard: Shard, cores: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return this rank's share of the worker's cores, as even as possible and at least one."""
    if cores is None:
        return None
    share = tuple(cores[place] for place in shard.vocabulary(len(cores)))
    return share or (cores[shard.rank % len(cores)],)


def threads_of(shard: Shard, cores: tuple[int, ...] | None) -> int:
    """Return the CPU threads of this rank: one per core, or its share of all, at most those available."""
    own = cores_of(shard, cores)
    if own is not None:
        return len(own)
    return max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)) // shard.degree))
