"""Host memory through which blocks are copied between segments and a pool, and where loaded blocks are verified."""

from collections.abc import Sequence

import torch

from baton.kvtransfer.checksum import Checksums
from baton.kvtransfer.slices import PoolShape, Storage, parts_of
from baton.kvtransfer.tier.records import HEADER_BYTES


class Staging:
    """Host memory for `slots` records. Only one thread at a time may use it."""

    def __init__(self, slots: int, block_bytes: int, pinned: bool = False) -> None:
        """Create the memory. `pinned`: page-locked, for copies from and to a GPU."""
        self.slots = slots
        self.block_bytes = block_bytes
        self.tensor = torch.empty(slots * block_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._bytes: memoryview = self.tensor.numpy().data
        self._headers = memoryview(bytearray(slots * HEADER_BYTES))
        self._checksums = Checksums(self.tensor, PoolShape(slots, block_bytes))

    def block(self, slot: int) -> memoryview:
        return self._bytes[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def header(self, slot: int) -> memoryview:
        return self._headers[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES]

    def checksum(self, slot: int) -> int:
        """Compute the checksum of the block in the slot, [0, 2^64)."""
        return self._checksums.of(slot)


class BlockCopier:
    """Copier of complete blocks between a pool and staging memory.

    A block in staging memory consists of the parts of all ranks, one after another.

    Any thread may call it.
    """

    def __init__(self, storage: Storage, shape: PoolShape, copies: Sequence[torch.Tensor] = ()) -> None:
        """Prepare copies. `copies`: other ranks' copies of an undivided pool, which `copy_in` updates too."""
        parts = parts_of(storage, shape)
        self._copies = [copy.view(shape.num_blocks, shape.block_bytes) for copy in copies]
        self._parts = [part.view(shape.num_blocks, shape.part_block_bytes) for part in parts]
        self._streams = {part.device: torch.cuda.Stream(part.device) for part in (*parts, *copies) if part.is_cuda}

    @property
    def on_gpu(self) -> bool:
        return bool(self._streams)

    def copy_out(self, blocks: Sequence[int], staging: Staging, first_slot: int = 0) -> None:
        """Copy blocks into staging slots from `first_slot` on; return when all copies have finished."""
        for place, block in enumerate(blocks, start=first_slot):
            for part, piece in zip(self._parts, self._pieces(staging, place), strict=True):
                self._copy(piece, part[block])
        self._settle()

    def copy_in(self, staging: Staging, blocks: Sequence[int], first_slot: int = 0) -> None:
        """Copy staging slots from `first_slot` on into blocks; return when all copies have finished."""
        for place, block in enumerate(blocks, start=first_slot):
            for part, piece in zip(self._parts, self._pieces(staging, place), strict=True):
                self._copy(part[block], piece)
            for copy in self._copies:
                self._copy(copy[block], self._pieces(staging, place)[0])
        self._settle()

    def _pieces(self, staging: Staging, slot: int) -> Sequence[torch.Tensor]:
        whole = staging.tensor[slot * staging.block_bytes : (slot + 1) * staging.block_bytes]
        return whole.view(len(self._parts), -1).unbind()

    def _copy(self, into: torch.Tensor, of: torch.Tensor) -> None:
        device = into.device if into.is_cuda else of.device
        if device.type == "cpu":
            into.numpy()[:] = of.numpy()  # numpy releases the GIL and starts no other threads
            return
        with torch.cuda.stream(self._streams[device]):
            into.copy_(of, non_blocking=True)

    def _settle(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
