"""Pulls blocks out of a peer's pool that this process can address, in host memory or on a GPU."""

from collections.abc import Sequence
from typing import Protocol

from kvtransfer.slices import PoolShape, Span, plan_slices, plan_spans
from kvtransfer.transport import BlockPair, LinkRate


class MappedMemory(Protocol):
    """A peer's pool beside our own. Its methods block, and bound their waiting."""

    def copy(self, spans: Sequence[Span]) -> None:
        """Returns when all of them have landed in our pool. Raises TransferError."""

    def measure(self, nbytes: int) -> LinkRate:
        """Reads at most so many of the peer's bytes, into no pool. Raises TransferError."""

    def close(self) -> None:
        """At any time, once; a copy that is running ends first or fails."""


class MappedTransport:
    """Owns `memory` and closes it. The pools may be cut into different numbers of parts."""

    name: str

    def __init__(
        self, memory: MappedMemory, source: PoolShape, own: PoolShape, own_parts: Sequence[int] | None = None
    ) -> None:
        """`own_parts`: those that lie in our pool's memory; None: all."""
        self._memory = memory
        self._source = source
        self._own = own
        self._slices = plan_slices(source, own, own_parts)

    def copy(self, transfer_id: bytes, pairs: Sequence[BlockPair]) -> int:
        """Raises, before anything is copied: BlockOutOfRange; also PeerUnreachable (closed), CopyBroken."""
        spans = list(plan_spans(pairs, self._slices, self._source, self._own))
        self._memory.copy(spans)
        return sum(span.rows * span.width for span in spans)

    def measure(self, nbytes: int) -> LinkRate:
        return self._memory.measure(nbytes)

    def close(self) -> None:
        self._memory.close()
