"""A pool in one piece or in several: each rank of a worker may have its part on a device of its own."""

from collections.abc import Sequence

import torch

from kvtransfer.slices import PoolShape
from kvtransfer.transport import BlockPair, LinkRate, Transport

Storage = torch.Tensor | tuple[torch.Tensor, ...]
"""All parts, one after the other in one dimension of uint8; or each by itself."""


def parts_of(storage: Storage, shape: PoolShape) -> tuple[torch.Tensor, ...]:
    """Each part: uint8 `[part_bytes]`, not a copy. Raises: ValueError for another number of them."""
    if isinstance(storage, torch.Tensor):
        return storage[: shape.parts * shape.part_bytes].view(shape.parts, shape.part_bytes).unbind()
    if len(storage) != shape.parts:
        raise ValueError(f"{len(storage)} parts of a pool that has {shape.parts}")
    return tuple(part[: shape.part_bytes] for part in storage)


class EachPart:
    """A `Transport` of one for each part of our pool, where those lie on different devices. Owns and closes them."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self.name = transports[0].name
        self._transports = transports

    def copy(self, transfer_id: bytes, pairs: Sequence[BlockPair]) -> int:
        """Raises their exceptions; for blocks out of range before anything is copied."""
        return sum(transport.copy(transfer_id, pairs) for transport in self._transports)

    def measure(self, nbytes: int) -> LinkRate:
        """Of the first: the others' are alike."""
        return self._transports[0].measure(nbytes)

    def close(self) -> None:
        for transport in self._transports:
            transport.close()
