"""Collectives between the ranks of one worker: torch.distributed's process groups, without its global state.

Ranks find each other through an anonymous file, and gloo binds to the loopback interface: nothing listens on other
interfaces.
"""

from datetime import timedelta
from pathlib import Path
from typing import Protocol, cast

import torch
from torch._C._distributed_c10d import AllreduceOptions, FileStore, ReduceOp, Store, Work

from baton.engine.parallel.shard import Shard

LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(seconds=60)  # maximum duration of a collective, including the wait for the slowest rank


def path_of(fd: int) -> Path:
    """Return a path to this process's open descriptor `fd`. The path is valid until `fd` is closed."""
    return Path(f"/proc/self/fd/{fd}")


class RankLost(RuntimeError):
    """Loss of another rank, which died or did not take part in time; the worker cannot continue."""


class Group(Protocol):
    """Methods that ProcessGroupGloo and ProcessGroupNCCL share; their type stubs have no common base class."""

    def allreduce(self, tensors: list[torch.Tensor], options: AllreduceOptions = ..., /) -> Work: ...

    def broadcast(self, tensor: torch.Tensor, root: int, /) -> Work: ...

    def allgather(self, output: list[list[torch.Tensor]], tensors: list[torch.Tensor], /) -> Work: ...

    def shutdown(self) -> None: ...

    def abort(self) -> None: ...


class Collectives:
    """Collectives of one rank. All ranks make the same calls in the same order. Not thread-safe."""

    def __init__(self, shard: Shard, meeting: Path, device: torch.device) -> None:
        """Connect, and wait for all ranks. `meeting`: path of the ranks' common file. Raises: RankLost."""
        self.shard = shard
        self._on_gpu = device.type == "cuda"
        try:
            store = FileStore(str(meeting), shard.degree)
            self._group = _nccl(store, shard) if self._on_gpu else _gloo(store, shard)
        except RuntimeError as error:
            raise RankLost(f"rank {shard.rank} did not meet the others: {error}") from error

    @property
    def backend(self) -> str:
        return "nccl" if self._on_gpu else "gloo"

    @property
    def can_be_recorded(self) -> bool:
        """Return whether a CUDA graph may contain these collectives."""
        return self._on_gpu

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace `tensor` in place by its sum over all ranks, which is bitwise equal on every rank."""
        self._wait(self._group.allreduce([tensor]))
        return tensor

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace each element in place by its maximum over all ranks."""
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.MAX)
        self._wait(self._group.allreduce([tensor], options))
        return tensor

    def from_leader(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite every rank's `tensor` with rank 0's."""
        self._wait(self._group.broadcast(tensor, 0))
        return tensor

    def side_by_side(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """Return all ranks' columns, `[rows, width]`. `part`: own columns, `[rows, len(Shard.vocabulary(width))]`."""
        degree = self.shard.degree
        widest = -(-width // degree)
        padded = part.new_zeros(len(part), widest)
        padded[:, : part.shape[1]] = part
        parts = [torch.empty_like(padded) for _ in range(degree)]
        self._wait(self._group.allgather([parts], [padded]))
        widths = [len(Shard(rank, degree).vocabulary(width)) for rank in range(degree)]
        return torch.cat([each[:, :size] for each, size in zip(parts, widths, strict=True)], dim=1)

    def close(self) -> None:
        self._group.shutdown()

    def abort(self) -> None:
        """Abort NCCL calls that wait for a lost rank, from any thread. No effect on gloo, which detects the loss."""
        if self._on_gpu:
            self._group.abort()

    def _wait(self, work: Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise RankLost(f"rank {self.shard.rank}: a collective with the other ranks failed: {error}") from error


def _gloo(store: Store, shard: Shard) -> Group:
    from torch._C._distributed_c10d import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = TIMEOUT
    return cast("Group", ProcessGroupGloo(store, shard.rank, shard.degree, options))


def _nccl(store: Store, shard: Shard) -> Group:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # missing in torch's CPU builds

    options = ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return cast("Group", ProcessGroupNCCL(store, shard.rank, shard.degree, options))
