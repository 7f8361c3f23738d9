"""A rank that computes the leader's plans: `python -m baton.engine.parallel.rank_process FD`. See other_ranks.py.

It ends when the leader does, and may not continue when another rank is lost. Signals are for the leader.
"""

import json
import logging
import mmap
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn, Protocol

import torch

from baton.engine.config.model_config import ModelError
from baton.engine.kv_cache.layout import KV_DTYPES, kv_layout
from baton.engine.kv_cache.memory import CudaMeter, LargestStep, MemoryMeter, StepTrial, largest_plan
from baton.engine.load import load_part
from baton.engine.parallel import wire
from baton.engine.parallel.collectives import Collectives, RankLost
from baton.engine.parallel.model import ParallelModel
from baton.engine.parallel.other_ranks import cores_of, threads_of
from baton.engine.parallel.shard import Shard
from baton.engine.parallel.wire import RankPool, RankStart, StepToMeasure
from baton.engine.prepare import DTYPES
from baton.engine.request import Plan
from baton.engine.runner.cuda_graphs import GraphSizes
from baton.engine.runner.runner import HostPool, Runner

logger = logging.getLogger(__name__)
LOST = 3


OpenPart = Callable[[str, torch.device], torch.Tensor]
"""Memory that the leader has made for a rank: uint8, one dimension, on that device. Raises: RankLost."""


def main(open_part: OpenPart | None = None, meter: Callable[[torch.device], MemoryMeter] = CudaMeter) -> int:
    """`open_part`: for a leader that hands out such memory by `part_handles`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a leader that drains needs us to its end
    connection = socket.socket(fileno=int(sys.argv[1]))
    start = RankStart.of_bytes(wire.receive(connection).payload)
    try:
        model = _load(start)
    except (ModelError, RankLost) as error:
        wire.send(connection, wire.FAILED, str(error).encode())
        return LOST
    process = RankProcess(connection, start, model, open_part, meter)
    try:
        wire.send(connection, wire.READY, b"")
        process.follow()
    except wire.Closed:
        return 0
    except RankLost as error:
        logger.error("%s", error)
        return LOST


class RankRunner(Protocol):
    """The calls of engine/runner/runner.py's Runner at each step."""

    def follow(self, plan: Plan) -> None: ...

    def settle(self) -> None: ...


def carry_out(connection: socket.socket, runner: RankRunner, plan: Plan) -> None:
    """Without chunks there is no sum that the leader could wait for: it is sent MOVED instead. Raises: wire.Closed."""
    runner.follow(plan)
    if not plan.chunks:
        runner.settle()
        wire.send(connection, wire.MOVED, b"")


class RankProcess:
    """Carries out the leader's commands, frame by frame."""

    def __init__(
        self,
        connection: socket.socket,
        start: RankStart,
        model: ParallelModel,
        open_part: OpenPart | None,
        meter: Callable[[torch.device], MemoryMeter],
    ) -> None:
        self._connection = connection
        self._shard = Shard(start.rank, start.degree)
        self._model = model
        self._open_part = open_part
        self._meter = meter
        self._trial: StepTrial | None = None
        self._runner: Runner | None = None

    def follow(self) -> NoReturn:
        """Until the leader closes. Raises: wire.Closed, RankLost."""
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
            else:
                raise RankLost(f"rank {self._shard.rank} was sent {frame.kind}, which means nothing now")

    def _compute_logits(self, rows: int) -> None:
        model = self._model
        with torch.inference_mode():
            hidden = torch.empty(rows, model.config.hidden_size, dtype=model.dtype, device=model.device)
            model.logits_together(hidden)

    def _measure(self, step: StepToMeasure) -> None:
        """Up to the logits, which the leader announces."""
        layout = kv_layout(self._model.config, KV_DTYPES[step.kv_dtype], step.block_tokens)
        plan = largest_plan(LargestStep(step.tokens, step.sequences), step.block_tokens, step.longest)
        self._trial = StepTrial(self._model, layout, plan, self._meter(self._model.device))
        self._trial.runner.follow(plan)

    def _lay_pool(self, pool: RankPool) -> None:
        layout = kv_layout(self._model.config, KV_DTYPES[pool.kv_dtype], pool.block_tokens)
        part_bytes = layout.block_bytes * pool.total_blocks
        try:
            storage = self._storage(pool, part_bytes)
        except RankLost as error:
            wire.send(self._connection, wire.FAILED, str(error).encode())
            raise
        host = HostPool(storage.view(pool.total_blocks, layout.block_bytes), pool.host_slots)
        self._runner = Runner(self._model, layout, layout.view(storage, pool.total_blocks), host)
        wire.send(self._connection, wire.READY, b"")

    def _storage(self, pool: RankPool, part_bytes: int) -> torch.Tensor:
        """This rank's part of the pool, zeros at first. Of a pool that is shared no other part is mapped."""
        device = self._model.device
        if pool.part_handle is not None and self._open_part is not None:
            return self._open_part(pool.part_handle, device)[:part_bytes]
        if not pool.sends_fd:
            return torch.zeros(part_bytes, dtype=torch.uint8, device=device)
        fd = wire.receive_fd(self._connection)
        skipped = part_bytes * self._shard.rank
        offset = skipped % mmap.ALLOCATIONGRANULARITY
        mapping = mmap.mmap(fd, offset + part_bytes, offset=skipped - offset)
        os.close(fd)
        return torch.frombuffer(mapping, dtype=torch.uint8, count=part_bytes, offset=offset)


def _load(start: RankStart) -> ParallelModel:
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
    collectives = Collectives(shard, Path(start.meeting), device)
    part = load_part(Path(start.folder), DTYPES[start.dtype], device, False, start.quantize, collectives)
    return ParallelModel(part, collectives, announce_logits=lambda rows: None)


def _device(start: RankStart) -> torch.device:
    leader = torch.device(start.device)
    return leader if leader.type == "cpu" else torch.device(leader.type, (leader.index or 0) + start.rank)


if __name__ == "__main__":
    sys.exit(main())
