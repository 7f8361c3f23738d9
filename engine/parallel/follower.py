"""A rank that is told what to compute: `python -m engine.parallel.follower FD`, see engine/parallel/followers.py.

It ends when the leader does, and may not go on when another rank is lost. Signals are for the leader.
"""

import json
import logging
import mmap
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

from engine.host_pool import HostPool
from engine.kv_layout import KV_DTYPES, kv_layout
from engine.model_config import ModelError
from engine.parallel import wire
from engine.parallel.collectives import Collectives, RankLost
from engine.parallel.followers import FollowerStart, RankOptions, cores_of, threads_of
from engine.parallel.load import load_part
from engine.parallel.model import ParallelModel
from engine.parallel.shard import Shard
from engine.prepare import DTYPES
from engine.runner import Runner

logger = logging.getLogger(__name__)
LOST = 3


OpenPart = Callable[[str, torch.device], torch.Tensor]
"""Memory that the leader has made for a rank: uint8, one dimension, on that device. Raises: RankLost."""


def main(open_part: OpenPart | None = None) -> int:
    """`open_part`: for a leader that hands out such memory by `part_handles`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a leader that drains needs us to its end
    connection = socket.socket(fileno=int(sys.argv[1]))
    start = _start_of(wire.receive(connection).payload)
    try:
        model, runner = _load(start, open_part)
    except (ModelError, RankLost) as error:
        wire.send(connection, wire.FAILED, str(error).encode())
        return LOST
    try:
        wire.send(connection, wire.READY, b"")
        _follow(connection, model, runner)
    except wire.Closed:
        return 0
    except RankLost as error:
        logger.error("%s", error)
        return LOST


def _follow(connection: socket.socket, model: ParallelModel, runner: Runner) -> NoReturn:
    """Until the leader closes. Raises: wire.Closed, RankLost."""
    while True:
        frame = wire.receive(connection)
        if frame.kind == wire.PLAN:
            plan = wire.plan_of(frame.payload)
            runner.follow(plan)
            if not plan.chunks:
                wire.send(connection, wire.MOVED, b"")
        else:
            rows = int.from_bytes(frame.payload, "little")
            with torch.inference_mode():
                hidden = torch.empty(rows, model.config.hidden_size, dtype=model.dtype, device=model.device)
                model.logits_together(hidden)


def _start_of(payload: bytes) -> FollowerStart:
    values = json.loads(payload)
    return FollowerStart(**{**values, "options": RankOptions(**values["options"])})


def _load(start: FollowerStart, open_part: OpenPart | None) -> tuple[ParallelModel, Runner]:
    shard = Shard(start.rank, start.degree)
    device = _device(start)
    if device.type == "cpu":
        torch.set_num_threads(threads_of(shard, start.cores))
    else:
        torch.cuda.set_device(device)
    cores = cores_of(shard, start.cores)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    if start.options.nice:
        os.setpriority(os.PRIO_PROCESS, 0, start.options.nice)
    collectives = Collectives(shard, Path(start.meeting), device)
    part = load_part(Path(start.folder), DTYPES[start.dtype], device, False, start.quantize, collectives)
    model = ParallelModel(part, collectives, announce_logits=lambda rows: None)
    layout = kv_layout(model.config, KV_DTYPES[start.kv_dtype], start.block_tokens)
    part_bytes = layout.block_bytes * start.total_blocks
    if open_part is not None and start.options.part_handles:
        storage = open_part(start.options.part_handles[shard.rank], device)[:part_bytes]
    else:
        storage = _storage(start, shard, part_bytes, device)
    blocks = storage.view(start.total_blocks, layout.block_bytes)
    host = HostPool(blocks, start.host_slots)
    return model, Runner(model, layout, layout.view(storage, start.total_blocks), host)


def _device(start: FollowerStart) -> torch.device:
    leader = torch.device(start.device)
    return leader if leader.type == "cpu" else torch.device(leader.type, (leader.index or 0) + start.rank)


def _storage(start: FollowerStart, shard: Shard, part_bytes: int, device: torch.device) -> torch.Tensor:
    """This rank's part of the pool, zeros at first. Of a pool that is shared no other part is mapped."""
    fd = start.options.storage_fd
    if fd is None:
        return torch.zeros(part_bytes, dtype=torch.uint8, device=device)
    skipped = part_bytes * shard.rank
    offset = skipped % mmap.ALLOCATIONGRANULARITY
    mapping = mmap.mmap(fd, offset + part_bytes, offset=skipped - offset)
    os.close(fd)
    return torch.frombuffer(mapping, dtype=torch.uint8, count=part_bytes, offset=offset)


if __name__ == "__main__":
    sys.exit(main())
