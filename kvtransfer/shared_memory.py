"""A peer's pool in shared host memory, read with plain copies."""

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvtransfer.backing import map_in
from kvtransfer.mapped import MappedTransport
from kvtransfer.peer import PeerMemory
from kvtransfer.slices import PoolShape, Span
from kvtransfer.transport import LinkRate

MAPPED_IN_BYTES = 2 << 30
"""So much of a peer's pool before its first copy, which takes 0.2 s; the rest as it is read, a fifth slower."""


class HostMemory:
    """Owns `peer` and closes it. `pool` is our own: uint8, one dimension, on CPU.

    numpy copies, not torch: they drop the interpreter lock as well, and stay on the calling thread, while torch would
    spread a copy over its compute threads.
    """

    def __init__(self, peer: PeerMemory, pool: torch.Tensor) -> None:
        self._peer = peer
        self._pool = pool.numpy()

    def copy(self, spans: Sequence[Span]) -> None:
        """Raises: PeerUnreachable (closed)."""
        source = self._peer.array
        for span in spans:
            np.copyto(
                _rows(self._pool, span.destination, span.rows, span.width, span.destination_pitch),
                _rows(source, span.source, span.rows, span.width, span.source_pitch),
            )

    def measure(self, nbytes: int) -> LinkRate:
        map_in(self._peer.array[:MAPPED_IN_BYTES])
        source = self._peer.array[:nbytes]
        scratch = np.empty_like(source)
        np.copyto(scratch, source)  # touches the pages, which would cost more than the copy
        started = time.monotonic()
        np.copyto(scratch, source)
        return LinkRate(source.size, time.monotonic() - started)

    def close(self) -> None:
        self._peer.close()


class SharedMemoryTransport(MappedTransport):
    """Between workers on the CPUs of one host."""

    name = "shared_memory"

    def __init__(self, peer: PeerMemory, pool: torch.Tensor, source: PoolShape, own: PoolShape) -> None:
        super().__init__(HostMemory(peer, pool), source, own)


def _rows(memory: npt.NDArray[np.uint8], offset: int, rows: int, width: int, pitch: int) -> npt.NDArray[np.uint8]:
    """A view; numpy refuses one that does not lie within `memory`."""
    return np.ndarray((rows, width), np.uint8, memory, offset, (pitch, 1))
