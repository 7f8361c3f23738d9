"""Messages of a group: a header that identifies the message, then the bytes of blocks, gathered out of a pool."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.gather_blocks import gather_blocks, scatter_blocks
from kvtransfer.errors import LinkBroken
from kvtransfer.parts import Storage, parts_of
from kvtransfer.slices import HeadSlice, PoolShape, plan_slices

HEADER = struct.Struct("<QQ")  # sequence, bytes of blocks
HEADER_BYTES = 64  # so that the blocks behind it are aligned
WANTED_MESSAGE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """Blocks as the reader wants them: one after the other for each piece of heads, of those that the source has."""

    source: PoolShape
    reader: PoolShape
    blocks_per_message: int

    @property
    def slices(self) -> tuple[HeadSlice, ...]:
        return plan_slices(self.source, self.reader)

    @property
    def message_bytes(self) -> int:
        return HEADER_BYTES + self.blocks_per_message * self.source.block_bytes


def blocks_per_message(shape: PoolShape) -> int:
    return max(1, min(shape.num_blocks, WANTED_MESSAGE_BYTES // shape.block_bytes))


def write_header(message: torch.Tensor, sequence: int, block_bytes: int) -> None:
    header = HEADER.pack(sequence, block_bytes).ljust(HEADER_BYTES, b"\0")
    message[:HEADER_BYTES].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))


def check_header(message: torch.Tensor, sequence: int, block_bytes: int) -> None:
    """Raises: LinkBroken, where this is another message than the one that was waited for."""
    found = HEADER.unpack(message[: HEADER.size].cpu().numpy().tobytes())
    if found != (sequence, block_bytes):
        raise LinkBroken(f"message {found[0]} of {found[1]} bytes came, {sequence} of {block_bytes} was awaited")


class Packer:
    """Moves blocks between `pool`, on any device, and messages of that device; of several, that of the first part."""

    def __init__(self, pool: Storage, shape: PoolShape, layout: MessageLayout, reads: bool) -> None:
        """`shape` is the pool's. `reads`: it is the source's of `layout`, and else the reader's."""
        parts = [part.view(shape.num_blocks, shape.rows, shape.row_bytes) for part in parts_of(pool, shape)]
        self._views = []  # of each slice: [block, row, bytes of the row]
        for piece in layout.slices:
            part = piece.source_part if reads else piece.destination_part
            start = piece.source_offset if reads else piece.destination_offset
            self._views.append(parts[part][:, :, start : start + piece.width])
        self.device = parts[0].device
        self._on_cpu = self.device.type == "cpu"

    def gather(self, blocks: Sequence[int], message: torch.Tensor) -> int:
        """Returns how many bytes were put behind the header."""
        end = HEADER_BYTES
        for view in self._views:
            start, end = end, end + len(blocks) * view[0].numel()
            self._copy(message[start:end].view(len(blocks), *view.shape[1:]), view, blocks, out_of_pool=True)
        return end - HEADER_BYTES

    def scatter(self, message: torch.Tensor, blocks: Sequence[int]) -> int:
        end = HEADER_BYTES
        for view in self._views:
            start, end = end, end + len(blocks) * view[0].numel()
            self._copy(message[start:end].view(len(blocks), *view.shape[1:]), view, blocks, out_of_pool=False)
        return end - HEADER_BYTES

    def _copy(self, packed: torch.Tensor, view: torch.Tensor, blocks: Sequence[int], out_of_pool: bool) -> None:
        if self._on_cpu:
            # numpy stays on this thread and drops the interpreter lock, as in HostMemory
            small, large = packed.numpy(), view.numpy()
            for index, block in enumerate(blocks):
                np.copyto(small[index], large[block]) if out_of_pool else np.copyto(large[block], small[index])
            return
        ids = torch.tensor(blocks, dtype=torch.int64).to(view.device, non_blocking=True)
        if view.device != self.device:
            _copy_across(packed, view, ids, out_of_pool)
        elif out_of_pool:
            gather_blocks(view, ids, packed)
        else:
            scatter_blocks(packed, view, ids)


def _copy_across(packed: torch.Tensor, view: torch.Tensor, ids: torch.Tensor, out_of_pool: bool) -> None:
    """Between the message's device and that of another rank; torch puts the two devices' work in order."""
    if out_of_pool:
        packed.copy_(view[ids])
    else:
        view[ids] = packed.to(view.device)
        torch.cuda.current_stream(view.device).synchronize()  # a group settles its own device alone
