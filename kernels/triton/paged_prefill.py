"""Prefill attention over paged KV: kernels/attention.py on a GPU.

A row of a tile is one query head of one token; all heads of a KV head stand side by side, so that keys are read once
for all of them. Tokens that every row sees go through a loop without masks; masks are only where the diagonal or the
edge of the window passes. The tiles with most to do start first.
"""

import torch
import triton
import triton.language as tl

from baton.kernels.triton.attention_tile import LOG2E, attend_tiles, paged_arguments
from baton.kernels.triton.call import KernelCall
from baton.kernels.triton.formats import FLOAT
from baton.kernels.triton.launch import Device, Tile, device_of, prefill_tile
from baton.kernels.types import KvLayer, Scoring

_LOG2E = tl.constexpr(LOG2E)


def paged_prefill(
    query: torch.Tensor, kv: KvLayer, block_ids: torch.Tensor, start: int, scoring: Scoring
) -> torch.Tensor:
    query = query.contiguous()
    output = torch.empty_like(query)
    prefill_call(query, kv, block_ids, start, scoring, output, device_of(query)).start()
    return output


def prefill_call(
    query: torch.Tensor,
    kv: KvLayer,
    block_ids: torch.Tensor,
    start: int,
    scoring: Scoring,
    output: torch.Tensor,
    device: Device,
    tile: Tile | None = None,
) -> KernelCall:
    """`tile` is for measurements."""
    tokens, heads, head_dim = query.shape
    paged = paged_arguments(query, kv, scoring, device)
    rows = tokens * (heads // kv.kv_heads)
    tile = tile or prefill_tile(device, head_dim, paged.itemsize, rows)
    arguments = paged.arguments | {
        "output": output,
        "block_ids": block_ids,
        "start": start,
        "tokens": tokens,
        "BLOCK_ROWS": tile.rows,
        "TILE": tile.tokens,
    }
    return KernelCall(attend_chunk, (-(-rows // tile.rows), kv.kv_heads), arguments, tile.warps, tile.stages)


@triton.jit(do_not_specialize=["start", "tokens", "window"])
def attend_chunk(
    query,
    output,
    data,
    scales,
    block_ids,
    slopes,
    start,
    tokens,
    factor,
    softcap,
    window,
    block_stride,
    part_stride,
    head_stride,
    scale_block_stride,
    scale_part_stride,
    scale_head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,
    COMPUTED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
):
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_ROWS
    kv_head = tl.program_id(1)
    rows, dims = first_row + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_DIM)
    chunk_tokens, heads = rows // GROUP, kv_head * GROUP + rows % GROUP
    positions = start + chunk_tokens
    inside = (chunk_tokens < tokens)[:, None] & (dims < HEAD_DIM)[None, :]
    places = (chunk_tokens.to(tl.int64) * HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    asked = tl.load(query + places, mask=inside, other=0.0).to(COMPUTED)
    row_slopes = None
    if slopes is not None:
        row_slopes = tl.load(slopes + heads) * _LOG2E
    keys = data + kv_head * head_stride
    key_scales, value_scales = None, None
    if FORMAT != FLOAT:
        key_scales = scales + kv_head * scale_head_stride
        value_scales = key_scales + scale_part_stride

    context = start + tokens
    first_position = start + first_row // GROUP
    last_position = tl.minimum(start + (first_row + BLOCK_ROWS - 1) // GROUP, context - 1)
    full_begin = 0
    full_end = (first_position + 1) // TILE * TILE  # all rows see what is before, but for a window
    most = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_ROWS], tl.float32)
    attended = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    if WINDOWED:
        oldest = tl.maximum(first_position - window + 1, 0) // TILE * TILE
        full_begin = tl.cdiv(tl.maximum(last_position - window + 1, 0), TILE) * TILE
        full_begin = tl.minimum(tl.maximum(full_begin, oldest), full_end)
        most, sums, attended = attend_tiles(
            most, sums, attended, asked, positions, row_slopes,
            keys, keys + part_stride, key_scales, value_scales, block_ids,
            oldest, full_begin, context, factor, softcap, window, block_stride, scale_block_stride,
            HEAD_DIM, BLOCK_DIM, BLOCK_TOKENS, TILE, FORMAT, WINDOWED, SOFTCAPPED, True,
        )  # fmt: skip
    most, sums, attended = attend_tiles(
        most, sums, attended, asked, positions, row_slopes,
        keys, keys + part_stride, key_scales, value_scales, block_ids,
        full_begin, full_end, context, factor, softcap, window, block_stride, scale_block_stride,
        HEAD_DIM, BLOCK_DIM, BLOCK_TOKENS, TILE, FORMAT, WINDOWED, SOFTCAPPED, False,
    )  # fmt: skip
    most, sums, attended = attend_tiles(
        most, sums, attended, asked, positions, row_slopes,
        keys, keys + part_stride, key_scales, value_scales, block_ids,
        full_end, last_position + 1, context, factor, softcap, window, block_stride, scale_block_stride,
        HEAD_DIM, BLOCK_DIM, BLOCK_TOKENS, TILE, FORMAT, WINDOWED, SOFTCAPPED, True,
    )  # fmt: skip
    tl.store(output + places, (attended / sums[:, None]).to(output.dtype.element_ty), mask=inside)
