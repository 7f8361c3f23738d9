"""Decode attention over paged KV: kernels/attention.py on a GPU.

A program computes all query heads of one KV head (padded to the 16 rows of a matrix instruction) over a part of one
sequence's context (Flash-Decoding). If a context has several parts, the program that finishes last combines their
results in order, without a second kernel. A counter of finished parts identifies this program. The grid depends only on
shapes and on a hint for the length of contexts, so that a captured CUDA graph serves contexts of any length.

Queries may be the unrotated output of a projection. Then each program rotates its queries, and the program whose part
contains the sequence's last token first stores the key and value of this token.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from baton.kernels.triton.attention_tile import attend_tiles, begun, context_splits, paged_arguments
from baton.kernels.triton.formats import FLOAT, largest_of
from baton.kernels.triton.launch import (
    DECODE_REGISTERS,
    Device,
    KernelCall,
    Tile,
    decode_tile,
    device_of,
    power_of_two,
)
from baton.kernels.triton.pages import Turning, put_heads, turned
from baton.kernels.types import DecodeRows, HeadNorms, KvLayer, Scoring

PARTS_AT_ONCE = 32
"""Number of parts that are combined in one pass. A loop combines further ones, so that one kernel serves any number."""
COMBINED_NUMBERS = 8192
"""Maximum amount of numbers, of several parts and heads, that a program combines at a time: 64 registers per thread."""


def paged_decode(
    query: torch.Tensor, kv: KvLayer, rows: DecodeRows, scoring: Scoring, out: torch.Tensor | None = None
) -> torch.Tensor:
    query = query.contiguous()
    output = query.new_empty(*query.shape[:2], kv.value_dim) if out is None else out
    decode_call(query, kv, rows, scoring, output, device_of(query)).start()
    return output


def rotated_decode(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: HeadNorms | None,
    kv: KvLayer,
    slots: torch.Tensor,
    angle_rows: torch.Tensor,
    rows: DecodeRows,
    scoring: Scoring,
) -> torch.Tensor:
    sequences, heads, head_dim = qkv.shape
    output = qkv.new_empty(sequences, heads - 2 * kv.kv_heads, head_dim)
    turning = Turning(cos, sin, angle_rows, norms, slots)
    decode_call(qkv.contiguous(), kv, rows, scoring, output, device_of(qkv), turning=turning).start()
    return output


_NOT_TURNED = dict.fromkeys(("cos", "sin", "angle_rows", "query_norm", "key_norm", "eps", "slots", "ANGLES"))


def decode_call(
    query: torch.Tensor,
    kv: KvLayer,
    rows: DecodeRows,
    scoring: Scoring,
    output: torch.Tensor,
    device: Device,
    splits: int | None = None,
    tile: Tile | None = None,
    turning: Turning | None = None,
) -> KernelCall:
    """Build the kernel call. query: queries; with `turning`, a projection's output of queries, keys and values.

    splits: number of parts; None: that of `context_splits`. tile: tile to use; None: that of `decode_tile`.
    """
    sequences, heads = output.shape[:2]
    paged = paged_arguments(output, kv, scoring, device)
    tile = tile or decode_tile(device, kv.head_dim, paged.itemsize, heads // kv.kv_heads)
    if splits is None:
        tokens = rows.usual_tokens or len(rows.block_ids) // max(sequences, 1) * kv.block_tokens
        tiles = -(-tokens // tile.tokens)
        splits = context_splits(sequences * kv.kv_heads, tiles, device.multiprocessors, tile.filling)
    parts = _no_parts() if splits == 1 else _parts(output, kv, splits, rows.arrivals)
    block_dim = paged.arguments["BLOCK_DIM"]
    parts_at_once = parts_together(block_dim)
    at_once = COMBINED_NUMBERS // (parts_at_once * block_dim)
    arguments = paged.arguments | parts | (_NOT_TURNED if turning is None else turning.arguments())
    arguments |= {
        "query": query,
        "output": output,
        "block_ids": rows.block_ids,
        "block_starts": rows.block_starts,
        "context_tokens": rows.context_tokens,
        "splits": splits,
        "BLOCK_ROWS": tile.rows,
        "TILE": tile.tokens,
        "LARGEST_NUMBER": largest_of(kv.data.dtype),
        "OVERLAPS": device.overlaps,
        "PARTS_AT_ONCE": parts_at_once,
        "HEADS_AT_ONCE": max(1, min(at_once, power_of_two(heads // kv.kv_heads))),
    }
    grid = (sequences, kv.kv_heads, splits)
    return KernelCall(attend_part, grid, arguments, tile.warps, tile.stages, DECODE_REGISTERS, device.overlaps)


def parts_together(block_dim: int) -> int:
    return min(PARTS_AT_ONCE, COMBINED_NUMBERS // block_dim)


def _no_parts() -> dict[str, Any]:
    return dict.fromkeys(("parts", "highest", "total", "arrivals"))


def _parts(output: torch.Tensor, kv: KvLayer, splits: int, arrivals: torch.Tensor | None) -> dict[str, Any]:
    """Allocate the results of parts and the counters of finished parts; return them as arguments of the kernel."""
    sequences, heads, value_dim = output.shape
    highest = output.new_empty(2, sequences, heads, splits, dtype=torch.float32)
    return {
        "parts": output.new_empty(sequences, heads, splits, value_dim, dtype=torch.float32),
        "highest": highest,
        "total": highest[1],
        "arrivals": output.new_zeros(sequences * kv.kv_heads, dtype=torch.int32) if arrivals is None else arrivals,
    }


def combine_call(parts: torch.Tensor, highest: torch.Tensor, output: torch.Tensor, block_dim: int) -> KernelCall:
    """Build the call of the kernel that combines the parts of each row.

    parts: float32 `[rows, heads, splits, value_dim]`; highest: `[2, rows, heads, splits]`, highest scores and totals.
    """
    rows, heads, splits, value_dim = parts.shape
    arguments = {
        "parts": parts,
        "highest": highest,
        "total": highest[1],
        "output": output,
        "splits": splits,
        "HEADS": heads,
        "VALUE_DIM": value_dim,
        "BLOCK_DIM": block_dim,
        "PARTS_AT_ONCE": parts_together(block_dim),
    }
    return KernelCall(combine_parts, (rows, heads), arguments, warps=4)


_TOTAL = ["total"]  # argument whose alignment varies: totals come after the highest scores, whose number varies


@triton.jit(do_not_specialize=["splits", "window"], do_not_specialize_on_alignment=_TOTAL)
def attend_part(
    query,
    output,
    parts,
    highest,
    total,
    arrivals,
    data,
    scales,
    block_ids,
    block_starts,
    context_tokens,
    cos,
    sin,
    angle_rows,
    query_norm,
    key_norm,
    eps,
    slots,
    sinks,
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
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ANGLES: tl.constexpr,
    FORMAT: tl.constexpr,
    COMPUTED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    LARGEST_NUMBER: tl.constexpr,
    PARTS_AT_ONCE: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    KV_HEADS: tl.constexpr = HEADS // GROUP
    sequence, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    rows, dims = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_DIM)
    heads = sequence * HEADS + kv_head * GROUP + rows
    real = rows < GROUP
    inside = real[:, None] & (dims < VALUE_DIM)[None, :]

    context = tl.load(context_tokens + sequence).to(tl.int32)
    own_blocks = block_ids + tl.load(block_starts + sequence)
    oldest = 0
    lowest = 0
    if WINDOWED:
        lowest = tl.maximum(context - window, 0)
        oldest = lowest // TILE * TILE
    share = tl.maximum(tl.cdiv(tl.cdiv(context - oldest, TILE), splits), 1) * TILE
    first = oldest + split * share
    end = tl.minimum(first + share, context)
    if first >= end:
        # This part has no tokens: the context has fewer tiles than parts, or the sequence is padding.
        if split == 0:
            tl.store(output + heads[:, None] * VALUE_DIM + dims[None, :], 0.0, mask=inside)
        return

    asked_rest = None
    if BLOCK_REST:
        rest_dims = VALUE_DIM + tl.arange(0, BLOCK_REST)
        inside_rest = real[:, None] & (rest_dims < HEAD_DIM)[None, :]
        asked_rest = tl.load(query + heads[:, None] * HEAD_DIM + rest_dims[None, :], mask=inside_rest, other=0.0)
        asked_rest = asked_rest.to(COMPUTED)
    if cos is None:
        asked = tl.load(query + heads[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
    else:
        angle, slot = tl.load(angle_rows + sequence), tl.load(slots + sequence)
        own_cos, own_sin = cos + angle * ANGLES, sin + angle * ANGLES
        base = query + sequence * (HEADS + 2 * KV_HEADS) * HEAD_DIM
        asked = turned(
            base + (kv_head * GROUP + rows) * HEAD_DIM, inside, query_norm, eps, own_cos, own_sin, dims, HEAD_DIM,
            ANGLES,
        ).to(query.dtype.element_ty)  # fmt: skip
        if (end == context) & (slot >= 0):
            _store_last(
                base, key_norm, eps, own_cos, own_sin, slot, kv_head, dims, data, scales,
                block_stride, part_stride, head_stride, scale_block_stride, scale_part_stride, scale_head_stride,
                HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS, ANGLES, FORMAT, LARGEST_NUMBER,
            )  # fmt: skip
    asked = asked.to(COMPUTED)
    keys = data + kv_head * head_stride
    key_scales, value_scales = None, None
    if FORMAT != FLOAT:
        key_scales = scales + kv_head * scale_head_stride
        value_scales = key_scales + scale_part_stride
    highest_before, total_before = begun(sinks, kv_head * GROUP + tl.minimum(rows, GROUP - 1), split == 0)
    # Mask every tile, though only the last needs it: a second loop would drain the pipeline, and masks are cheap.
    most, sums, attended = attend_tiles(
        highest_before,
        total_before,
        tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32),
        asked,
        asked_rest,
        tl.full([BLOCK_ROWS], 0, tl.int32) + (context - 1),
        keys,
        keys + part_stride,
        key_scales,
        value_scales,
        own_blocks,
        first,
        end,
        lowest,
        context,
        factor,
        softcap,
        window,
        block_stride,
        scale_block_stride,
        HEAD_DIM,
        VALUE_DIM,
        BLOCK_DIM,
        BLOCK_REST,
        BLOCK_TOKENS,
        TILE,
        FORMAT,
        WINDOWED,
        SOFTCAPPED,
        True,
        False,
    )
    if arrivals is None:
        result = (attended / sums[:, None]).to(output.dtype.element_ty)
        tl.store(output + heads[:, None] * VALUE_DIM + dims[None, :], result, mask=inside)
    else:
        places = heads * splits + split
        tl.store(highest + places, most, mask=real)
        tl.store(total + places, sums, mask=real)
        tl.store(parts + places[:, None] * VALUE_DIM + dims[None, :], attended, mask=inside)
        tl.debug_barrier()  # all threads must have written before the part is counted as finished
        used = tl.cdiv(context - oldest, share)
        counter = arrivals + sequence * KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == used - 1:
            tl.store(counter, 0)  # the next launch needs zeros
            for begin in range(0, GROUP, HEADS_AT_ONCE):
                some = begin + tl.arange(0, HEADS_AT_ONCE)
                own = sequence * HEADS + kv_head * GROUP + some
                result = _combined(
                    parts, highest, total, own, some < GROUP, used, splits, dims, VALUE_DIM, BLOCK_DIM,
                    HEADS_AT_ONCE, PARTS_AT_ONCE,
                )  # fmt: skip
                target = output + own[:, None] * VALUE_DIM + dims[None, :]
                kept = (some < GROUP)[:, None] & (dims < VALUE_DIM)[None, :]
                tl.store(target, result.to(output.dtype.element_ty), mask=kept)


@triton.jit
def _store_last(
    base,  # pointer to the sequence's queries, keys and values
    key_norm,
    eps,
    cos,
    sin,
    slot,
    kv_head,
    dims,
    data,
    scales,
    block_stride,
    part_stride,
    head_stride,
    scale_block_stride,
    scale_part_stride,
    scale_head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ANGLES: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST_NUMBER: tl.constexpr,
):
    """Store key and value of the sequence's last token in its slot of the pool, where this program reads them later."""
    kv_heads = kv_head + tl.arange(0, 1)
    inside = (kv_heads < KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    sources = base + (HEADS + kv_heads) * HEAD_DIM
    key = turned(sources, inside, key_norm, eps, cos, sin, dims, HEAD_DIM, ANGLES).to(base.dtype.element_ty)
    put_heads(
        key, slot, 0, kv_heads, inside, dims, data, scales,
        block_stride, part_stride, head_stride, scale_block_stride, scale_part_stride, scale_head_stride,
        KV_HEADS, HEAD_DIM, BLOCK_TOKENS, FORMAT, LARGEST_NUMBER,
    )  # fmt: skip
    value = tl.load((sources + KV_HEADS * HEAD_DIM)[:, None] + dims[None, :], mask=inside, other=0.0)
    put_heads(
        value, slot, 1, kv_heads, inside, dims, data, scales,
        block_stride, part_stride, head_stride, scale_block_stride, scale_part_stride, scale_head_stride,
        KV_HEADS, HEAD_DIM, BLOCK_TOKENS, FORMAT, LARGEST_NUMBER,
    )  # fmt: skip
    tl.debug_barrier()  # other threads will read the key and value


@triton.jit
def _combined(
    parts,
    highest,
    total,
    rows,  # int64 [heads]: index of each head among all heads of `output`
    real,
    used,  # number of parts with tokens; at most `splits`
    splits,
    dims,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    PARTS_AT_ONCE: tl.constexpr,
):
    """Combine the results of parts to float32 `[heads, dims]`. Loads bypass the L1 cache, which may be outdated."""
    parts_now = tl.arange(0, PARTS_AT_ONCE)
    most = tl.full([HEADS_AT_ONCE], -3.4e38, tl.float32)
    weight = tl.zeros([HEADS_AT_ONCE], tl.float32)
    attended = tl.zeros([HEADS_AT_ONCE, BLOCK_DIM], tl.float32)
    for begin in range(0, used, PARTS_AT_ONCE):
        there = real[:, None] & (begin + parts_now < used)[None, :]
        places = rows[:, None] * splits + (begin + parts_now)[None, :]
        highest_now = tl.load(highest + places, mask=there, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(total + places, mask=there, other=0.0, cache_modifier=".cg")
        written = (highest_now > float("-inf")) | (highest_now != highest_now)  # true for NaN, to propagate it
        more = tl.maximum(most, tl.max(highest_now, 1))
        kept = tl.where(written, tl.exp2(highest_now - more[:, None]), 0.0)
        inside = there[:, :, None] & (dims < VALUE_DIM)[None, None, :]
        of_dims = parts + places[:, :, None] * VALUE_DIM + dims[None, None, :]
        numbers = tl.load(of_dims, mask=inside, other=0.0, cache_modifier=".cg")
        numbers = tl.where(written[:, :, None], numbers, 0.0)  # a masked load would wait for `written`
        shrunk = tl.exp2(most - more)
        weight = weight * shrunk + tl.sum(kept * sums, 1)
        attended = attended * shrunk[:, None] + tl.sum(kept[:, :, None] * numbers, 1)
        most = more
    # A head without parts has the weight 0. Divide by 1 instead, for the result 0.
    return attended / tl.where(weight == 0.0, 1.0, weight)[:, None]


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=_TOTAL)
def combine_parts(
    parts,
    highest,
    total,
    output,
    splits,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PARTS_AT_ONCE: tl.constexpr,
):
    """Combine the results of parts of prefill attention. A part without tokens has the highest score -inf."""
    dims = tl.arange(0, BLOCK_DIM)
    row = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1) + tl.arange(0, 1)
    result = _combined(
        parts, highest, total, row, row >= 0, splits, splits, dims, VALUE_DIM, BLOCK_DIM, 1, PARTS_AT_ONCE
    )
    target = output + row[:, None] * VALUE_DIM + dims[None, :]
    tl.store(target, result.to(output.dtype.element_ty), mask=(row >= 0)[:, None] & (dims < VALUE_DIM)[None, :])
