"""Pulls blocks out of a peer's mapped pool with plain copies."""

import time
from collections.abc import Sequence

import numpy as np
import torch

from kvtransfer.errors import BlockOutOfRange
from kvtransfer.peer import PeerMemory
from kvtransfer.transport import BlockPair, LinkRate, split_runs


class SharedMemoryTransport:
    """Owns `peer` and closes it. `pool` is our own: uint8, one dimension, on CPU.

    numpy copies, not torch: they drop the interpreter lock as well, and stay on the calling thread, while torch would
    spread a copy over its compute threads.
    """

    name = "shared_memory"

    def __init__(self, peer: PeerMemory, pool: torch.Tensor, block_bytes: int) -> None:
        self._peer = peer
        self._pool = pool.numpy()
        self._block_bytes = block_bytes

    def copy(self, transfer_id: bytes, pairs: Sequence[BlockPair]) -> int:
        """Raises, before anything is copied: BlockOutOfRange, PeerUnreachable (closed)."""
        source, size = self._peer.array, self._block_bytes
        self._check(pairs, source.size // size, self._pool.size // size)
        for run in split_runs(pairs, _both_adjacent):
            nbytes, first = len(run) * size, run[0]
            start, target = first.source * size, first.destination * size
            np.copyto(self._pool[target : target + nbytes], source[start : start + nbytes])
        return len(pairs) * size

    def measure(self, nbytes: int) -> LinkRate:
        source = self._peer.array[:nbytes]
        scratch = np.empty_like(source)
        np.copyto(scratch, source)  # touches the pages, which would cost more than the copy
        started = time.monotonic()
        np.copyto(scratch, source)
        return LinkRate(source.size, time.monotonic() - started)

    def close(self) -> None:
        self._peer.close()

    @staticmethod
    def _check(pairs: Sequence[BlockPair], source_blocks: int, own_blocks: int) -> None:
        """Ids come from another process; a slice past the end would be cut short in silence."""
        for pair in pairs:
            if not (0 <= pair.source < source_blocks and 0 <= pair.destination < own_blocks):
                raise BlockOutOfRange(f"{pair} is not within {source_blocks} source, {own_blocks} own blocks")


def _both_adjacent(left: BlockPair, right: BlockPair) -> bool:
    return right.source == left.source + 1 and right.destination == left.destination + 1
