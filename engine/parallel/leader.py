"""The first rank of several: loads its part while the followers load theirs, and has a runner that drives them all."""

from pathlib import Path
from typing import Protocol

import torch

from engine.host_pool import HostPool
from engine.kv_layout import KvLayout
from engine.parallel.collectives import Collectives
from engine.parallel.followers import Followers, FollowerStart, RankOptions
from engine.parallel.load import load_part
from engine.parallel.model import ParallelModel
from engine.parallel.shard import Shard, shard_layout
from engine.runner import Runner


class Prepared(Protocol):
    """What is needed of engine/prepare.py's PreparedModel."""

    @property
    def layout(self) -> KvLayout:
        """Of all heads."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def total_blocks(self) -> int: ...

    def follower_start(self, host_slots: int, ranks: RankOptions) -> FollowerStart: ...


def load_parallel(
    prepared: Prepared, storage: torch.Tensor, progress: bool, host_slots: int, ranks: RankOptions
) -> Runner:
    """See PreparedModel.load. Raises: ModelError, RankLost."""
    start = prepared.follower_start(host_slots, ranks)
    followers = Followers(start)

    def load_own(meeting: Path) -> ParallelModel:
        collectives = Collectives(Shard(0, start.degree), meeting, storage.device)
        part = load_part(Path(start.folder), prepared.dtype, storage.device, progress, start.quantize, collectives)
        return ParallelModel(part, collectives, followers.announce_logits)

    model = followers.load(load_own)
    followers.abort = model.collectives.abort
    layout = shard_layout(prepared.layout, start.degree)
    own = storage[: prepared.total_blocks * layout.block_bytes]
    host = HostPool(own.view(prepared.total_blocks, layout.block_bytes), host_slots)
    return Runner(model, layout, layout.view(own, prepared.total_blocks), host, followers)
