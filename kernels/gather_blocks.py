"""Pages to ship: blocks, or some heads of each, into one contiguous piece and back."""

import torch

from kernels import reference
from kernels.check import check_dtype, check_index, check_shape
from kernels.on_triton import triton_kernels


def gather_blocks(blocks: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor) -> None:
    """Copies block `block_ids[i]` to `out[i]`.

    blocks: uint8 `[blocks, rows, row_bytes]`, rows contiguous: the pool's blocks as one row each, or as a row for each
    layer of keys and of values, of which a slice takes some heads. out: uint8 `[copies, rows, row_bytes]`, likewise;
    block_ids: int64 `[copies]`, each in `[0, blocks)`.
    """
    _check(blocks, block_ids, out)
    kernels = triton_kernels(blocks)
    (reference if kernels is None else kernels).gather_blocks(blocks, block_ids, out)


def scatter_blocks(source: torch.Tensor, blocks: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Copies `source[i]` to block `block_ids[i]`: the inverse of gather_blocks. Block ids are distinct."""
    _check(blocks, block_ids, source)
    kernels = triton_kernels(blocks)
    (reference if kernels is None else kernels).scatter_blocks(source, blocks, block_ids)


def _check(blocks: torch.Tensor, block_ids: torch.Tensor, piece: torch.Tensor) -> None:
    check_index("block_ids", block_ids)
    check_shape("blocks", blocks, None, None, None)
    check_shape("the piece", piece, len(block_ids), *blocks.shape[1:])
    for name, tensor in (("blocks", blocks), ("the piece", piece)):
        check_dtype(name, tensor, torch.uint8)
