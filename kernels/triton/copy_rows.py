"""Rectangles of blocks from one place to another: gathering and scattering pages to ship them, and copy on write.

Blocks are `[blocks, rows, row_bytes]`: one row where a block is one extent, more where only some heads of it are meant.
Copies go by the widest word that all addresses are a multiple of; a program moves COPY_BYTES, in 16 bytes a thread.
"""

import math

import torch
import triton
import triton.language as tl

from kernels.kv_pages import KvPages
from kernels.triton.call import KernelCall
from kernels.triton.launch import COPY_BYTES

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def gather_blocks(blocks: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor) -> None:
    copy_call(blocks, block_ids, out, None, len(block_ids)).start()


def scatter_blocks(source: torch.Tensor, blocks: torch.Tensor, block_ids: torch.Tensor) -> None:
    copy_call(source, None, blocks, block_ids, len(block_ids)).start()


def copy_blocks(kv: KvPages, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    for part in (kv.data, kv.scales):
        if part is not None:
            # One row per layer, part and head; `view` refuses where that would be a copy.
            rows = part.view(torch.uint8).view(kv.blocks, kv.layers * 2 * kv.kv_heads, -1)
            copy_call(rows, sources, rows, destinations, len(sources)).start()


def copy_call(
    source: torch.Tensor,
    source_ids: torch.Tensor | None,
    target: torch.Tensor,
    target_ids: torch.Tensor | None,
    copies: int,
) -> KernelCall:
    """Block `source_ids[i]` to block `target_ids[i]`; None stands for i itself. Both uint8 `[blocks, rows, bytes]`."""
    if source.shape[1:] != target.shape[1:] or source.stride(2) != 1 or target.stride(2) != 1:
        raise ValueError(f"rows of {list(source.shape)} and {list(target.shape)} are not alike, or not contiguous")
    rows, row_bytes = source.shape[1:]
    word_bytes = math.gcd(8, row_bytes, *source.stride()[:2], *target.stride()[:2], _address(source), _address(target))
    word = _WORDS[word_bytes]
    words = row_bytes // word_bytes
    block = COPY_BYTES // word_bytes
    arguments = {
        "source": source.view(word),
        "target": target.view(word),
        "source_ids": source_ids,
        "target_ids": target_ids,
        "source_block_stride": source.stride(0) // word_bytes,
        "target_block_stride": target.stride(0) // word_bytes,
        "source_row_stride": source.stride(1) // word_bytes,
        "target_row_stride": target.stride(1) // word_bytes,
        "words": words,
        "BLOCK": block,
    }
    return KernelCall(copy_row, (copies, rows, -(-words // block)), arguments, warps=4)


def _address(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else tensor.data_ptr()


@triton.jit
def copy_row(
    source,
    target,
    source_ids,
    target_ids,
    source_block_stride,
    target_block_stride,
    source_row_stride,
    target_row_stride,
    words,
    BLOCK: tl.constexpr,
):
    copy, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source_block, target_block = copy, copy
    if source_ids is not None:
        source_block = tl.load(source_ids + copy)
    if target_ids is not None:
        target_block = tl.load(target_ids + copy)
    places = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = places < words
    read = source + source_block * source_block_stride + row * source_row_stride
    written = target + target_block * target_block_stride + row * target_row_stride
    tl.store(written + places, tl.load(read + places, mask=inside), mask=inside)
