"""Leader's side of tensor parallelism: start the other ranks' processes, send them each step's plan, stop them."""

import contextlib
import json
import logging
import os
import select
import socket
import subprocess
import sys
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
from baton.engine.parallel.collectives import TIMEOUT, RankLost, path_of
from baton.engine.parallel.shard import Shard
from baton.engine.parallel.wire import AdapterToAdd, RankOptions, RankPool, RankStart, StepToMeasure, WeightsToRead
from baton.engine.request import Plan

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 900.0  # maximum time to read a rank's part of a checkpoint
ADAPTER_TIMEOUT_S = 60.0  # maximum time to read an adapter; no step runs during the read
STOP_TIMEOUT_S = 5.0
EXIT_TIMEOUT_S = 1.0  # maximum wait for a process's exit after its connection closed
Made = TypeVar("Made")


class OtherRanks:
    """Processes of ranks 1 and up, each connected by a socket. They stop on `close`, or when this process exits."""

    def __init__(self, start: RankStart) -> None:
        # The ranks' common file is anonymous, so that no file is left behind. Its descriptor is never closed: a
        # FileStore writes to /proc/self/fd/N until destroyed, and a closed number N could be reused for another file.
        self._meeting_fd = os.memfd_create("baton-ranks")
        self._start = start
        self.processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []
        self._closing = self._is_one_lost = False
        self.abort: Callable[[], None] = lambda: None
        """Function that releases threads of the leader which wait for a lost rank."""

    def load(self, load_own: Callable[[Path], Made]) -> Made:
        """Load all ranks' parts in parallel. `load_own`: loads the leader's part, given the path of the common file.

        Raises: ModelError with a rank's message, RankLost.
        """
        with ExitStack() as undo:
            undo.callback(self.close)
            for rank in range(1, self._start.degree):
                self._spawn(replace(self._start, rank=rank))
            loaded = load_own(path_of(self._meeting_fd))
            deadline = time.monotonic() + LOAD_TIMEOUT_S
            for rank, connection in enumerate(self._connections, start=1):
                self._wait_ready(rank, connection, deadline)
            undo.pop_all()
        return loaded

    def measure(self, step: StepToMeasure) -> None:
        """Let the other ranks compute a step over temporary blocks, together with the leader. Raises: RankLost."""
        self._tell(wire.MEASURE, step.to_bytes())

    def memories(self) -> list[StepMemory]:
        """Return each other rank's memory use in the step of `measure`, in rank order. Raises: RankLost."""
        self._tell(wire.MEMORY, b"")
        frames = [_receive(*pair, TIMEOUT.total_seconds()) for pair in enumerate(self._connections, start=1)]
        return [StepMemory(**json.loads(frame.payload)) for frame in frames]

    def lay_pool(self, pool: RankPool, options: RankOptions) -> None:
        """Let the other ranks create or map their parts of the pool. Raises: ModelError of a rank, RankLost."""
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
        """Let the other ranks record CUDA graphs while the leader does, because the graphs contain sums over ranks."""
        self._tell(wire.RECORD, wire.SIZES.pack(rows, blocks))

    def carry_out(self, plan: Plan) -> None:
        """Let the other ranks compute their parts of a plan. Raises: RankLost."""
        self._tell(wire.PLAN, wire.plan_bytes(plan))

    def whole(self, results: Callable[[], Made]) -> Made:
        """Return the results of a step after checking that no rank was lost. Raises: RankLost.

        On GPUs, `abort` completes collectives without the lost rank's part and without an error: hence the check.
        """
        made = results()
        if self._is_one_lost:
            raise RankLost("a rank was lost; the results of this step may be incomplete")
        return made

    def wait_moved(self) -> None:
        """Wait until the other ranks have executed a plan without chunks. Raises: RankLost.

        Plans with chunks need no call: their sums wait for all ranks.
        """
        for rank, connection in enumerate(self._connections, start=1):
            _receive(rank, connection, TIMEOUT.total_seconds())

    def add_adapter(self, adapter: AdapterToAdd, number: int) -> None:
        """Add an adapter on all other ranks; if one fails, remove it from all. `number`: the leader's adapter number.

        Raises: ModelError with a rank's message, RankLost.
        """
        self._tell(wire.ADD_ADAPTER, adapter.to_bytes())
        self._check_added(ADAPTER_TIMEOUT_S, self.remove_adapter, number)

    def remove_adapter(self, number: int) -> None:
        """Remove an adapter on the other ranks. Raises: RankLost."""
        self._tell(wire.REMOVE_ADAPTER, number.to_bytes(8, "little"))

    def read_weights(self, folder: str) -> None:
        """Let each rank read its part of new weights while steps continue.

        An empty `folder` discards weights that were read before.

        Raises: RankLost.
        """
        self._tell(wire.READ_WEIGHTS, WeightsToRead(folder).to_bytes())

    def add_weights(self, number: int) -> None:
        """Add the weights of `read_weights`, once all ranks have read them. `number`: the leader's number for them.

        Raises: RankLost; ModelError with the message of a rank that failed: then no rank has the weights.
        """
        self._tell(wire.ADD_WEIGHTS, number.to_bytes(8, "little"))
        self._check_added(LOAD_TIMEOUT_S, self.remove_weights, number)

    def remove_weights(self, number: int) -> None:
        """Remove weights on the other ranks. Raises: RankLost."""
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
        """Tell the other ranks that the leader needs logits of `rows` rows. Raises: RankLost."""
        self._tell(wire.LOGITS, rows.to_bytes(8, "little"))

    def close(self) -> None:
        """Stop the ranks by closing their connections; kill processes that do not exit in time."""
        self._closing = True
        for connection in self._connections:
            with contextlib.suppress(OSError):  # the process has already exited
                connection.shutdown(socket.SHUT_RDWR)
        for process in self.processes:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self._connections:
            connection.close()
        self._connections, self.processes = [], []

    @property
    def degree(self) -> int:
        """Number of ranks including the leader."""
        return self._start.degree

    def _spawn(self, start: RankStart) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", start.entry, str(theirs.fileno())]
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=child_environment(),
                process_group=0,  # Ctrl-C must not end ranks: the leader may still drain
            )
            self.processes.append(process)
        self._connections.append(ours)
        wire.send(ours, wire.START, start.to_bytes())
        wire.send_fd(ours, self._meeting_fd)

    def _wait_ready(self, rank: int, connection: socket.socket, deadline: float) -> None:
        frame = _receive(rank, connection, max(0.001, deadline - time.monotonic()))
        if frame.kind == wire.FAILED:
            raise ModelError(f"rank {rank}: {frame.payload.decode()}")

    def _watch(self, on_lost: Callable[[RankLost], None]) -> None:
        poll = select.poll()
        ranks = {connection.fileno(): rank for rank, connection in enumerate(self._connections, start=1)}
        for descriptor in ranks:
            poll.register(descriptor, 0)  # event mask 0: poll still reports a hang-up
        descriptor, _ = poll.poll()[0]
        if self._closing:
            return
        self._is_one_lost = True  # set before `abort`, which lets sums complete without the lost rank's part
        process = self.processes[ranks[descriptor] - 1]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_TIMEOUT_S)
        lost = RankLost(f"rank {ranks[descriptor]}, process {process.pid}, ended: exit code {process.returncode}")
        logger.error("%s", lost)  # here, since a collective that breaks may end the worker before `on_lost`
        self.abort()
        on_lost(lost)

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
    """Return this rank's equal part of the worker's `cores`, at least one core. None: ranks are not bound to cores."""
    if cores is None:
        return None
    share = tuple(cores[place] for place in shard.vocabulary(len(cores)))
    return share or (cores[shard.rank % len(cores)],)


def threads_of(shard: Shard, cores: tuple[int, ...] | None) -> int:
    """Return this rank's number of CPU threads: one per bound core; if unbound, an equal part of available cores."""
    own = cores_of(shard, cores)
    if own is not None:
        return len(own)
    return max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)) // shard.degree))
