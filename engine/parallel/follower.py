"""A rank that is told what to compute: `python -m engine.parallel.follower FD`, see engine/parallel/followers.py.

It ends when the leader does, and may not go on when another rank is lost.
"""

import json
import logging
import mmap
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

import torch

from engine.host_pool import HostPool
from engine.kv_layout import KV_DTYPES, kv_layout
from engine.model_config import ModelError
from engine.parallel import wire
from engine.parallel.collectives import Collectives, RankLost
from engine.parallel.followers import FollowerStart, cores_of
from engine.parallel.load import load_part
from engine.parallel.model import ParallelModel
from engine.parallel.shard import Shard
from engine.prepare import DTYPES
from engine.runner import Runner

logger = logging.getLogger(__name__)
LOST = 3


def main() -> int:
    connection = socket.socket(fileno=int(sys.argv[1]))
    start = FollowerStart(**json.loads(wire.receive(connection).payload))
    try:
        model, runner = _load(start)
    except (ModelError, RankLost) as error:
        wire.send(connection, wire.FAILED, str(error).encode())
        return LOST
    wire.send(connection, wire.READY, b"")
    try:
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
            runner.follow(wire.plan_of(frame.payload))
        else:
            rows = int.from_bytes(frame.payload, "little")
            with torch.inference_mode():
                hidden = torch.empty(rows, model.config.hidden_size, dtype=model.dtype, device=model.device)
                model.logits_together(hidden)


def _load(start: FollowerStart) -> tuple[ParallelModel, Runner]:
    shard = Shard(start.rank, start.degree)
    device = _device(start)
    cores = cores_of(shard, start.cores)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    if device.type == "cpu":
        torch.set_num_threads(1 if cores is None else len(cores))
    else:
        torch.cuda.set_device(device)
    collectives = Collectives(shard, Path(start.meeting), device)
    part = load_part(Path(start.folder), DTYPES[start.dtype], device, False, start.quantize, collectives)
    model = ParallelModel(part, collectives, announce_logits=lambda rows: None)
    layout = kv_layout(model.config, KV_DTYPES[start.kv_dtype], start.block_tokens)
    storage = _storage(start, shard, layout.block_bytes * start.total_blocks, device)
    blocks = storage.view(start.total_blocks, layout.block_bytes)
    host = HostPool(blocks, start.host_slots)
    return model, Runner(model, layout, layout.view(storage, start.total_blocks), host)


def _device(start: FollowerStart) -> torch.device:
    leader = torch.device(start.device)
    return leader if leader.type == "cpu" else torch.device(leader.type, (leader.index or 0) + start.rank)


def _storage(start: FollowerStart, shard: Shard, part_bytes: int, device: torch.device) -> torch.Tensor:
    """This rank's part of the pool, zeros at first."""
    if start.storage_fd is None:
        return torch.zeros(part_bytes, dtype=torch.uint8, device=device)
    mapping = mmap.mmap(start.storage_fd, part_bytes * shard.degree)
    return torch.frombuffer(mapping, dtype=torch.uint8, count=part_bytes, offset=part_bytes * shard.rank)


if __name__ == "__main__":
    sys.exit(main())
