"""The first rank of several: loads its part while the others load theirs, and has a runner that drives them all."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from baton.engine.kv_cache.host_pool import HostPool
from baton.engine.kv_cache.layout import KvLayout
from baton.engine.load import load_part
from baton.engine.parallel.collectives import Collectives
from baton.engine.parallel.model import ParallelModel
from baton.engine.parallel.orders import RankOptions, RankPool, RankStart
from baton.engine.parallel.other_ranks import OtherRanks
from baton.engine.parallel.shard import Shard, shard_layout
from baton.engine.runner.cuda_graphs import GraphSizes
from baton.engine.runner.runner import Runner


class Prepared(Protocol):
    """The used part of engine/prepare.py's PreparedModel."""

    @property
    def layout(self) -> KvLayout:
        """Of all heads."""

    @property
    def total_blocks(self) -> int: ...

    def rank_pool(self, host_slots: int) -> RankPool: ...


@dataclass(frozen=True, slots=True)
class LoadedRanks:
    """A model on all ranks, without a pool yet."""

    model: ParallelModel  # the first rank's part
    other_ranks: OtherRanks  # to be closed


def load_ranks(start: RankStart, dtype: torch.dtype, device: torch.device, progress: bool) -> LoadedRanks:
    """All parts at once. Raises: ModelError, RankLost."""
    other_ranks = OtherRanks(start)

    def load_own(meeting: Path) -> ParallelModel:
        collectives = Collectives(Shard(0, start.degree), meeting, device)
        part = load_part(Path(start.folder), dtype, device, progress, start.quantize, collectives)
        return ParallelModel(part, collectives, other_ranks.announce_logits)

    model = other_ranks.load(load_own)
    other_ranks.abort = model.collectives.abort
    return LoadedRanks(model, other_ranks)


def parallel_runner(
    prepared: Prepared,
    ranks: LoadedRanks,
    storage: torch.Tensor,
    host_slots: int,
    options: RankOptions,
    graphs: GraphSizes | None,
) -> Runner:
    """See PreparedModel.load; owns the ranks, also where it fails. Raises: ModelError, RankLost."""
    with ExitStack() as undo:
        undo.callback(ranks.other_ranks.close)
        ranks.other_ranks.lay_pool(prepared.rank_pool(host_slots), options)
        layout = shard_layout(prepared.layout, ranks.other_ranks.degree)
        own = storage[: prepared.total_blocks * layout.block_bytes]
        host = HostPool(own.view(prepared.total_blocks, layout.block_bytes), host_slots)
        pool = layout.view(own, prepared.total_blocks)
        runner = Runner(ranks.model, layout, pool, host, ranks.other_ranks, graphs)
        undo.pop_all()
    return runner
