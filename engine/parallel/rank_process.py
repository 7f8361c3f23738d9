"""Process of a rank that executes the leader's plans: `python -m baton.engine.parallel.rank_process FD`.

The process stops when the leader stops or another rank is lost. It ignores signals, which the leader handles.
"""

import contextlib
import faulthandler
import json
import logging
import mmap
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn, Protocol

import torch

from baton.engine.config.model_config import ModelError
from baton.engine.kv_cache.layout import KV_DTYPES, kv_layout
from baton.engine.kv_cache.memory import CudaMeter, LargestStep, MemoryMeter, StepTrial, largest_plan
from baton.engine.load import load_part
from baton.engine.lora.adapters import AdapterSet
from baton.engine.lora.files import read_named
from baton.engine.on_device import made_on, mib
from baton.engine.parallel import wire
from baton.engine.parallel.collectives import Collectives, RankLost, path_of
from baton.engine.parallel.model import ParallelModel
from baton.engine.parallel.other_ranks import cores_of, threads_of
from baton.engine.parallel.shard import Shard
from baton.engine.parallel.wire import AdapterToAdd, RankPool, RankStart, StepToMeasure, WeightsToRead
from baton.engine.prepare import DTYPES
from baton.engine.reload.runners import STARTED, RunnersByWeights
from baton.engine.request import Plan
from baton.engine.runner.cuda_graphs import GraphSizes
from baton.engine.runner.runner import HostPool, Runner

logger = logging.getLogger(__name__)
EXIT_LOST = 3
LEADER_POLL_MS = 50


OpenPart = Callable[[str, torch.device], torch.Tensor]
"""Function that opens a rank's memory, which the leader allocated: one-dimensional uint8 on the device.

Raises: RankLost.
"""


def main(open_part: OpenPart | None = None, meter: Callable[[torch.device], MemoryMeter] = CudaMeter) -> int:
    """Run a rank. `open_part`: opens the pool's memory if the leader passes it by `part_handles`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the leader needs its ranks while it drains
    faulthandler.register(signal.SIGQUIT, all_threads=True)
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        start = RankStart.of_bytes(wire.receive(connection).payload)
        meeting = path_of(wire.receive_fd(connection))
    except wire.Closed:
        return EXIT_LOST
    adapters, loaded = AdapterSet(), threading.Event()
    watching = threading.Thread(target=_end_with_leader, args=(connection, loaded), daemon=True)
    watching.start()
    try:
        process = RankProcess(connection, start, _load(start, meeting, adapters), adapters, open_part, meter)
    except (ModelError, RankLost) as error:
        with contextlib.suppress(wire.Closed):
            wire.send(connection, wire.FAILED, str(error).encode())
        return EXIT_LOST
    loaded.set()
    watching.join()
    try:
        wire.send(connection, wire.READY, b"")
        process.follow()
    except wire.Closed:
        return 0
    except (ModelError, RankLost) as error:
        logger.error("rank %d stops: %s", start.rank, error)
        return EXIT_LOST


def _end_with_leader(connection: socket.socket, loaded: threading.Event) -> None:
    """Exit if the leader exits before `loaded` is set: the main thread, which is loading weights, would not notice."""
    poll = select.poll()
    poll.register(connection, 0)  # event mask 0: poll still reports a hang-up
    while not loaded.is_set():
        if poll.poll(LEADER_POLL_MS):
            os._exit(EXIT_LOST)


class RankRunner(Protocol):
    """Methods of Runner (engine/runner/runner.py) that `carry_out` calls."""

    def follow(self, plan: Plan) -> None: ...

    def settle(self) -> None: ...


def carry_out(connection: socket.socket, runner: RankRunner, plan: Plan) -> None:
    """Execute a plan. Send MOVED for a plan without chunks, because no sum waits for this rank. Raises: wire.Closed."""
    runner.follow(plan)
    if not plan.chunks:
        runner.settle()
        wire.send(connection, wire.MOVED, b"")


class RankProcess:
    """Executor of the leader's commands, frame by frame."""

    def __init__(
        self,
        connection: socket.socket,
        start: RankStart,
        model: ParallelModel,
        adapters: AdapterSet,
        open_part: OpenPart | None,
        meter: Callable[[torch.device], MemoryMeter],
    ) -> None:
        self._connection = connection
        self._start = start
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._reading: Future[ParallelModel] | None = None
        self._weights: RunnersByWeights | None = None
        self._shard = Shard(start.rank, start.degree)
        self._model = model
        self._models = {STARTED: model}  # models by the number of their weights
        self._adapters = adapters
        self._open_part = open_part
        self._meter = meter
        self._trial: StepTrial | None = None
        self._runner: Runner | None = None

    def follow(self) -> NoReturn:
        """Execute the leader's commands until it closes the connection. Raises: wire.Closed, RankLost."""
        while True:
            frame = wire.receive(self._connection)
            if frame.kind == wire.POOL:
                self._lay_pool(RankPool.of_bytes(frame.payload))
            elif frame.kind == wire.LOGITS:
                self._compute_logits(int.from_bytes(frame.payload, "little"))
            elif frame.kind == wire.MEASURE:
                self._measure(StepToMeasure.of_bytes(frame.payload))
            elif frame.kind == wire.MEMORY and self._trial is not None:
                memory, self._trial = self._trial.memory(), None
                wire.send(self._connection, wire.MEMORY, json.dumps(asdict(memory)).encode())
            elif frame.kind == wire.PLAN and self._runner is not None:
                carry_out(self._connection, self._runner, wire.plan_of(frame.payload))
            elif frame.kind == wire.RECORD and self._runner is not None:
                self._runner.record(GraphSizes(*wire.SIZES.unpack(frame.payload)))
            elif frame.kind == wire.ADD_ADAPTER:
                self._add_adapter(AdapterToAdd.of_bytes(frame.payload))
            elif frame.kind == wire.REMOVE_ADAPTER:
                self._adapters.remove(int.from_bytes(frame.payload, "little"))
            elif frame.kind == wire.READ_WEIGHTS:
                self._read_weights(WeightsToRead.of_bytes(frame.payload))
            elif frame.kind == wire.ADD_WEIGHTS and self._runner is not None:
                self._add_weights(self._runner, int.from_bytes(frame.payload, "little"))
            elif frame.kind == wire.REMOVE_WEIGHTS and self._weights is not None:
                self._remove_weights(self._weights, int.from_bytes(frame.payload, "little"))
            else:
                raise RankLost(f"rank {self._shard.rank} got command {frame.kind}, which it does not expect now")

    def _add_adapter(self, asked: AdapterToAdd) -> None:
        """Add an adapter. A failed adapter also consumes a number, so that numbers stay equal on all ranks."""
        try:
            read = read_named(asked.name, Path(asked.folder))
            if read.digest != asked.digest:
                raise ModelError(f"adapter {asked.name!r} changed while it was read; retry")
            self._adapters.add(asked.name, read.adapter)
        except ModelError as error:
            self._adapters.skip()
            wire.send(self._connection, wire.FAILED, str(error).encode())
        else:
            wire.send(self._connection, wire.READY, b"")

    def _read_weights(self, asked: WeightsToRead) -> None:
        """Start to read weights on a thread, while steps continue. An empty folder discards weights that were read."""
        self._reading = None
        if asked.folder:
            start = replace(self._start, folder=asked.folder)
            self._reading = self._reader.submit(_load_part, start, self._model.collectives, self._model.device)

    def _add_weights(self, runner: Runner, number: int) -> None:
        """Add the weights that were read. This consumes one adapter number, even on failure."""
        self._adapters.skip()
        self._weights = self._weights or RunnersByWeights(runner)
        reading, self._reading = self._reading, None
        try:
            if reading is None:
                raise ModelError("no weights were read")
            self._models[number] = reading.result()
            self._weights.add(number, self._models[number])
        except ModelError as error:
            wire.send(self._connection, wire.FAILED, str(error).encode())
        else:
            wire.send(self._connection, wire.READY, b"")

    def _remove_weights(self, weights: RunnersByWeights, number: int) -> None:
        if self._models.pop(number, None) is not None:
            weights.remove(number)
            self._model = next(iter(self._models.values()))

    def _compute_logits(self, rows: int) -> None:
        model = self._model if self._weights is None else self._models[self._weights.latest]
        with torch.inference_mode():
            hidden = torch.empty(rows, model.config.hidden_size, dtype=model.dtype, device=model.device)
            model.logits_together(hidden)

    def _measure(self, step: StepToMeasure) -> None:
        """Compute the step whose memory is measured, but not its logits: the leader requests logits by LOGITS."""
        layout = kv_layout(self._model.config, KV_DTYPES[step.kv_dtype], step.block_tokens)
        plan = largest_plan(LargestStep(step.tokens, step.sequences), layout, step.longest)
        self._trial = StepTrial(self._model, layout, plan, self._meter(self._model.device))
        self._trial.runner.follow(plan)

    def _lay_pool(self, pool: RankPool) -> None:
        layout = kv_layout(self._model.config, KV_DTYPES[pool.kv_dtype], pool.block_tokens)
        part_bytes = layout.block_bytes * pool.total_blocks
        try:
            storage = self._storage(pool, part_bytes)
        except (ModelError, RankLost) as error:
            wire.send(self._connection, wire.FAILED, str(error).encode())
            raise
        host = HostPool(storage.view(pool.total_blocks, layout.block_bytes), pool.host_slots)
        self._runner = Runner(self._model, layout, layout.view(storage, pool.total_blocks), host)
        wire.send(self._connection, wire.READY, b"")

    def _storage(self, pool: RankPool, part_bytes: int) -> torch.Tensor:
        """Return this rank's part of the KV pool, initially zeros. Of shared memory, map only this part."""
        device = self._model.device
        if pool.part_handle is not None and self._open_part is not None:
            return self._open_part(pool.part_handle, device)[:part_bytes]
        if not pool.sends_fd:
            with made_on(device, f"a KV pool of {mib(part_bytes)}"):
                return torch.zeros(part_bytes, dtype=torch.uint8, device=device)
        fd = wire.receive_fd(self._connection)
        skipped = part_bytes * self._shard.rank
        offset = skipped % mmap.ALLOCATIONGRANULARITY
        mapping = mmap.mmap(fd, offset + part_bytes, offset=skipped - offset)
        os.close(fd)
        return torch.frombuffer(mapping, dtype=torch.uint8, count=part_bytes, offset=offset)


def _load(start: RankStart, meeting: Path, adapters: AdapterSet) -> ParallelModel:
    shard = Shard(start.rank, start.degree)
    device = _device(start)
    if device.type == "cpu":
        torch.set_num_threads(threads_of(shard, start.cores))
    else:
        torch.cuda.set_device(device)
    cores = cores_of(shard, start.cores)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    if start.nice:
        os.setpriority(os.PRIO_PROCESS, 0, start.nice)
    collectives = Collectives(shard, meeting, device)
    return _load_part(start, collectives, device, adapters)


def _load_part(
    start: RankStart, collectives: Collectives, device: torch.device, adapters: AdapterSet | None = None
) -> ParallelModel:
    """Load this rank's part of a model. Raises: ModelError."""
    part = load_part(Path(start.folder), DTYPES[start.dtype], device, False, start.quantize, collectives, adapters)
    return ParallelModel(part, collectives, announce_logits=lambda rows: None)


def _device(start: RankStart) -> torch.device:
    leader = torch.device(start.device)
    return leader if leader.type == "cpu" else torch.device(leader.type, (leader.index or 0) + start.rank)


if __name__ == "__main__":
    sys.exit(main())
