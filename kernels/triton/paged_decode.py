"""Decode attention over paged KV: kernels/attention.py on a GPU.

One program takes all query heads of one KV head (padded to the 16 rows of a matrix instruction) over a part of one
sequence's context; where a context has several parts, a second kernel combines them (Flash-Decoding). The grid follows
from shapes and a hint alone, so that a captured graph serves all contexts.
"""

import torch
import triton
import triton.language as tl

from baton.kernels.triton.attention_tile import LOG2E, attend_tiles, context_splits, paged_arguments
from baton.kernels.triton.formats import FLOAT
from baton.kernels.triton.launch import Device, KernelCall, Tile, decode_tile, device_of
from baton.kernels.types import DecodeRows, KvLayer, Scoring

PARTS_AT_ONCE = 32
"""That are combined in one pass: a loop over them needs one variant of the kernel, whatever their number."""

_LOG2E = tl.constexpr(LOG2E)


def paged_decode(
    query: torch.Tensor, kv: KvLayer, rows: DecodeRows, scoring: Scoring, out: torch.Tensor | None = None
) -> torch.Tensor:
    query = query.contiguous()
    output = torch.empty_like(query) if out is None else out
    for call in decode_calls(query, kv, rows, scoring, output, device_of(query)):
        call.start()
    return output


def decode_calls(
    query: torch.Tensor,
    kv: KvLayer,
    rows: DecodeRows,
    scoring: Scoring,
    output: torch.Tensor,
    device: Device,
    splits: int | None = None,
    tile: Tile | None = None,
) -> list[KernelCall]:
    """The parts, then the call that combines them unless there is only one. `splits`, `tile`: for measurements."""
    sequences, heads, head_dim = query.shape
    paged = paged_arguments(query, kv, scoring, device)
    tile = tile or decode_tile(device, head_dim, paged.itemsize, heads // kv.kv_heads)
    if splits is None:
        tokens = rows.usual_tokens or len(rows.block_ids) // max(sequences, 1) * kv.block_tokens
        tiles = -(-tokens // tile.tokens)
        splits = context_splits(sequences * kv.kv_heads, tiles, device.multiprocessors, tile.filling)
    single = splits == 1
    highest = None if single else query.new_empty(2, sequences, heads, splits, dtype=torch.float32)
    parts = output if single else query.new_empty(sequences, heads, splits, head_dim, dtype=torch.float32)
    arguments = paged.arguments | {
        "output": parts,
        "highest": highest,
        "total": None if highest is None else highest[1],
        "block_ids": rows.block_ids,
        "block_starts": rows.block_starts,
        "context_tokens": rows.context_tokens,
        "splits": splits,
        "BLOCK_ROWS": tile.rows,
        "TILE": tile.tokens,
        "SINGLE": single,
    }
    attend = KernelCall(attend_part, (sequences, kv.kv_heads, splits), arguments, tile.warps, tile.stages)
    if highest is None:
        return [attend]
    return [attend, combine_call(parts, highest, output, paged.arguments["BLOCK_DIM"])]


def combine_call(parts: torch.Tensor, highest: torch.Tensor, output: torch.Tensor, block_dim: int) -> KernelCall:
    """parts: float32 `[rows, heads, splits, head_dim]`; highest: `[2, rows, heads, splits]`, with their totals."""
    rows, heads, splits, head_dim = parts.shape
    arguments = {
        "parts": parts,
        "highest": highest,
        "total": highest[1],
        "output": output,
        "splits": splits,
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": block_dim,
        "PARTS_AT_ONCE": PARTS_AT_ONCE,
    }
    return KernelCall(combine_parts, (rows, heads), arguments, warps=4)


@triton.jit(do_not_specialize=["splits", "window"])
def attend_part(
    query,
    output,
    highest,
    total,
    data,
    scales,
    block_ids,
    block_starts,
    context_tokens,
    slopes,
    splits,
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
    SINGLE: tl.constexpr,
):
    sequence, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    rows, dims = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_DIM)
    heads = sequence * HEADS + kv_head * GROUP + rows
    real = rows < GROUP
    inside = real[:, None] & (dims < HEAD_DIM)[None, :]

    context = tl.load(context_tokens + sequence).to(tl.int32)
    oldest = 0
    if WINDOWED:
        oldest = tl.maximum(context - window, 0) // TILE * TILE
    share = tl.cdiv(tl.cdiv(context - oldest, TILE), splits) * TILE
    first = oldest + split * share
    end = tl.minimum(first + share, context)
    if first >= end:
        # Nothing to do here: padding, or fewer tiles than parts. Numbers of an empty part are never read.
        if SINGLE:
            tl.store(output + heads[:, None] * HEAD_DIM + dims[None, :], 0.0, mask=inside)
        else:
            tl.store(highest + heads * splits + split, float("-inf"), mask=real)
            tl.store(total + heads * splits + split, 0.0, mask=real)
        return

    asked = tl.load(query + heads[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0).to(COMPUTED)
    row_slopes = None
    if slopes is not None:
        row_slopes = tl.load(slopes + kv_head * GROUP + rows, mask=real, other=0.0) * _LOG2E
    keys = data + kv_head * head_stride
    key_scales, value_scales = None, None
    if FORMAT != FLOAT:
        key_scales = scales + kv_head * scale_head_stride
        value_scales = key_scales + scale_part_stride
    # One loop, masked throughout: leaving it for a last tile would empty the pipeline, and comparing is cheap here.
    most, sums, attended = attend_tiles(
        tl.full([BLOCK_ROWS], float("-inf"), tl.float32),
        tl.zeros([BLOCK_ROWS], tl.float32),
        tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32),
        asked,
        tl.full([BLOCK_ROWS], 0, tl.int32) + (context - 1),
        row_slopes,
        keys,
        keys + part_stride,
        key_scales,
        value_scales,
        block_ids + tl.load(block_starts + sequence),
        first,
        end,
        context,
        factor,
        softcap,
        window,
        block_stride,
        scale_block_stride,
        HEAD_DIM,
        BLOCK_DIM,
        BLOCK_TOKENS,
        TILE,
        FORMAT,
        WINDOWED,
        SOFTCAPPED,
        True,
        False,
    )
    if SINGLE:
        result = (attended / sums[:, None]).to(output.dtype.element_ty)
        tl.store(output + heads[:, None] * HEAD_DIM + dims[None, :], result, mask=inside)
    else:
        places = heads * splits + split
        tl.store(highest + places, most, mask=real)
        tl.store(total + places, sums, mask=real)
        tl.store(output + places[:, None] * HEAD_DIM + dims[None, :], attended, mask=inside)


@triton.jit(do_not_specialize=["splits"])
def combine_parts(
    parts,
    highest,
    total,
    output,
    splits,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PARTS_AT_ONCE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    parts_now, dims = tl.arange(0, PARTS_AT_ONCE), tl.arange(0, BLOCK_DIM)
    most = tl.full([], -3.4e38, tl.float32)
    weight = tl.zeros([], tl.float32)
    attended = tl.zeros([BLOCK_DIM], tl.float32)
    for begin in range(0, splits, PARTS_AT_ONCE):
        real = begin + parts_now < splits
        places = row * splits + begin + parts_now
        highest_now = tl.load(highest + places, mask=real, other=float("-inf"))
        sums = tl.load(total + places, mask=real, other=0.0)
        used = (highest_now > float("-inf")) | (highest_now != highest_now)  # not a number: it must reach the result
        more = tl.maximum(most, tl.max(highest_now, 0))
        kept = tl.where(used, tl.exp2(highest_now - more), 0.0)
        inside = used[:, None] & (dims < HEAD_DIM)[None, :]
        numbers = tl.load(parts + places[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
        shrunk = tl.exp2(most - more)
        weight = weight * shrunk + tl.sum(kept * sums, 0)
        attended = attended * shrunk + tl.sum(kept[:, None] * numbers, 0)
        most = more
    # A sequence without any context has no weight at all, and zeros.
    result = attended / tl.where(weight == 0.0, 1.0, weight)
    tl.store(output + row * HEAD_DIM + dims, result.to(output.dtype.element_ty), mask=dims < HEAD_DIM)
