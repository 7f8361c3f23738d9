"""Host memory for the KV of preempted sequences: blocks are carried out to slots and brought back, byte for byte."""

from collections.abc import Sequence

import torch

from baton.engine.plan import BlockSwap


class HostPool:
    """`total_slots` slots of one block each, for the pool that `blocks` is: uint8 `[blocks, block_bytes]`, borrowed.

    The memory is taken with the first swap, pinned where the pool is a GPU's: copies then run on its stream, in order
    with the kernels that compute on the blocks.
    """

    def __init__(self, blocks: torch.Tensor, total_slots: int) -> None:
        if blocks.dtype != torch.uint8 or blocks.dim() != 2:
            raise ValueError(f"the pool must be uint8 [blocks, block_bytes], got {blocks.dtype} {list(blocks.shape)}")
        self.total_slots = total_slots
        self._blocks = blocks
        self._slots: torch.Tensor | None = None

    def carry_out(self, swaps: Sequence[BlockSwap]) -> None:
        for swap in swaps:
            self._memory()[swap.host_slot].copy_(self._blocks[swap.block], non_blocking=True)

    def bring_back(self, swaps: Sequence[BlockSwap]) -> None:
        for swap in swaps:
            self._blocks[swap.block].copy_(self._memory()[swap.host_slot], non_blocking=True)

    def _memory(self) -> torch.Tensor:
        if self._slots is None:
            shape = (self.total_slots, self._blocks.shape[1])
            self._slots = torch.empty(shape, dtype=torch.uint8, pin_memory=self._blocks.device.type == "cuda")
        return self._slots
