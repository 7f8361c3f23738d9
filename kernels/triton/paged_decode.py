"""Decode attention over paged KV: kernels/attention.py on a GPU.

One program takes all query heads of one KV head (padded to the 16 rows of a matrix instruction) over a part of one
sequence's context; where a context has several parts, a second kernel combines them (Flash-Decoding). The grid follows
from shapes and a hint alone, so that a captured graph serves all contexts.
"""

import torch
import triton
import triton.language as tl

from baton.kernels.triton.attention_tile import LOG2E, attend_tiles, decode_splits, paged_arguments
from baton.kernels.triton.call import KernelCall, power_of_two
from baton.kernels.triton.formats import FLOAT
from baton.kernels.triton.launch import Device, Tile, decode_tile, device_of
from baton.kernels.types import KvLayer, Scoring

_LOG2E = tl.constexpr(LOG2E)


def paged_decode(
    query: torch.Tensor,
    kv: KvLayer,
    block_ids: torch.Tensor,
    block_starts: torch.Tensor,
    context_tokens: torch.Tensor,
    scoring: Scoring,
    usual_tokens: int | None = None,
) -> torch.Tensor:
    query = query.contiguous()
    output = torch.empty_like(query)
    for call in decode_calls(
        query,
        kv,
        block_ids,
        block_starts,
        context_tokens,
        scoring,
        output,
        device_of(query),
        usual_tokens=usual_tokens,
    ):
        call.start()
    return output


def decode_calls(
    query: torch.Tensor,
    kv: KvLayer,
    block_ids: torch.Tensor,
    block_starts: torch.Tensor,
    context_tokens: torch.Tensor,
    scoring: Scoring,
    output: torch.Tensor,
    device: Device,
    splits: int | None = None,
    tile: Tile | None = None,
    usual_tokens: int | None = None,
) -> list[KernelCall]:
    """The parts, then the call that combines them unless there is only one. `splits`, `tile`: for measurements."""
    sequences, heads, head_dim = query.shape
    paged = paged_arguments(query, kv, scoring, device)
    tile = tile or decode_tile(device, head_dim, paged.itemsize, heads // kv.kv_heads)
    if splits is None:
        tokens = usual_tokens or len(block_ids) // max(sequences, 1) * kv.block_tokens
        tiles = -(-tokens // tile.tokens)
        splits = decode_splits(sequences * kv.kv_heads, tiles, device.multiprocessors, tile.filling)
    single = splits == 1
    highest = None if single else query.new_empty(2, sequences, heads, splits, dtype=torch.float32)
    parts = output if single else query.new_empty(sequences, heads, splits, head_dim, dtype=torch.float32)
    arguments = paged.arguments | {
        "output": parts,
        "highest": highest,
        "total": None if highest is None else highest[1],
        "block_ids": block_ids,
        "block_starts": block_starts,
        "context_tokens": context_tokens,
        "splits": splits,
        "BLOCK_ROWS": tile.rows,
        "TILE": tile.tokens,
        "SINGLE": single,
    }
    attend = KernelCall(attend_part, (sequences, kv.kv_heads, splits), arguments, tile.warps, tile.stages)
    if highest is None:
        return [attend]
    combining = {
        "parts": parts,
        "highest": highest,
        "total": highest[1],
        "output": output,
        "splits": splits,
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": paged.arguments["BLOCK_DIM"],
        "BLOCK_SPLITS": power_of_two(splits),
    }
    return [attend, KernelCall(combine_parts, (sequences, heads), combining, warps=4)]


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
    BLOCK_SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    part, dims = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_DIM)
    places = row * splits + part
    most = tl.load(highest + places, mask=part < splits, other=float("-inf"))
    sums = tl.load(total + places, mask=part < splits, other=0.0)
    used = most > float("-inf")
    used = used | (most != most)  # what is not a number must reach the result
    kept = tl.where(used, tl.exp2(most - tl.maximum(tl.max(most, 0), -3.4e38)), 0.0)
    inside = used[:, None] & (dims < HEAD_DIM)[None, :]
    numbers = tl.load(parts + places[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
    weight = tl.sum(kept * sums, 0)
    # A sequence without any context has no weight at all, and zeros.
    result = tl.sum(kept[:, None] * numbers, 0) / tl.where(weight == 0.0, 1.0, weight)
    tl.store(output + row * HEAD_DIM + dims, result.to(output.dtype.element_ty), mask=dims < HEAD_DIM)
