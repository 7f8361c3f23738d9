"""Prefill attention over paged KV: kernels/attention.py on a GPU.

A row of a tile is one query head of one token. All query heads of a KV head are adjacent, so that they share each read
of keys. Keys that every row sees are processed in a loop without masks; only the diagonal and the edge of the window
need masks. The tiles with the longest contexts start first.

One launch computes all chunks of a step; its programs read where each chunk begins and ends. A few new tokens after a
long cached prefix have too few tiles to fill the GPU. In this case the context is split as in decode, and a second
kernel combines the parts (Flash-Decoding).
"""

import torch
import triton
import triton.language as tl

from baton.kernels.triton.attention_tile import attend_tiles, begun, context_splits, paged_arguments
from baton.kernels.triton.formats import FLOAT
from baton.kernels.triton.launch import Device, KernelCall, Tile, device_of, prefill_tile
from baton.kernels.triton.paged_decode import combine_call
from baton.kernels.types import KvLayer, PrefillChunks, Scoring


def paged_prefill(
    query: torch.Tensor, kv: KvLayer, block_ids: torch.Tensor, start: int, scoring: Scoring
) -> torch.Tensor:
    output = query.new_empty(*query.shape[:2], kv.value_dim)
    paged_prefills(query, kv, PrefillChunks.one(len(query), start, block_ids), scoring, output)
    return output


def paged_prefills(
    query: torch.Tensor, kv: KvLayer, prefills: PrefillChunks, scoring: Scoring, out: torch.Tensor
) -> None:
    for call in prefill_calls(query.contiguous(), kv, prefills, scoring, out, device_of(query)):
        call.start()


def prefill_calls(
    query: torch.Tensor,
    kv: KvLayer,
    prefills: PrefillChunks,
    scoring: Scoring,
    output: torch.Tensor,
    device: Device,
    splits: int | None = None,
    tile: Tile | None = None,
) -> list[KernelCall]:
    """Return the call that computes attention; if contexts are split, also the call that combines the parts.

    splits: number of parts; None: that of `context_splits`. tile: tile to use; None: that of `prefill_tile`.
    """
    tokens, heads, head_dim = query.shape
    paged = paged_arguments(query, kv, scoring, device)
    group, chunks = heads // kv.kv_heads, prefills.chunks
    lengths = [each.rows.stop - each.rows.start for each in chunks]
    tile = tile or prefill_tile(device, head_dim, paged.itemsize, max(lengths) * group, kv.scales is not None)
    row_tiles = [-(-length * group // tile.rows) for length in lengths]
    if splits is None:
        window = scoring.window
        seen = max(
            (each.start if window is None else min(each.start, window)) + length
            for each, length in zip(chunks, lengths, strict=True)
        )
        pairs, tiles = sum(row_tiles) * kv.kv_heads, -(-seen // tile.tokens)
        fills = pairs >= device.multiprocessors  # if so, do not split: parts would take gigabytes
        splits = 1 if fills else context_splits(pairs, tiles, device.multiprocessors, filling=1)
    single = splits == 1
    highest = None if single else query.new_empty(2, tokens, heads, splits, dtype=torch.float32)
    parts = output if single else query.new_empty(tokens, heads, splits, kv.value_dim, dtype=torch.float32)
    arguments = paged.arguments | {
        "output": parts,
        "highest": highest,
        "total": None if highest is None else highest[1],
        "block_ids": prefills.block_ids,
        "block_starts": prefills.block_starts,
        "row_starts": prefills.row_starts,
        "ends": prefills.ends,
        "chunks": len(chunks),
        "splits": splits,
        "BLOCK_ROWS": tile.rows,
        "TILE": tile.tokens,
        "SINGLE": single,
    }
    # Upper bound of the tile indices passed to `chunk_of`. Per chunk, at most one index is unused; programs of unused
    # indices return immediately.
    grid = (tokens * group // tile.rows + len(chunks), kv.kv_heads, splits)
    attend = KernelCall(attend_chunk, grid, arguments, tile.warps, tile.stages)
    return [attend] if highest is None else [attend, combine_call(parts, highest, output, paged.arguments["BLOCK_DIM"])]


@triton.jit
def first_tile(row_starts, chunk, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Return the index of a chunk's first tile in the step. There may be one unused index before it."""
    return (tl.load(row_starts + chunk) * GROUP // BLOCK_ROWS + chunk).to(tl.int32)


@triton.jit
def chunk_of(row_starts, chunks, tile, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Return the index of the chunk that a tile of the step belongs to."""
    chunk = tl.full([], 0, tl.int32)
    beyond = chunk + chunks
    while beyond - chunk > 1:
        middle = (chunk + beyond) // 2
        is_before = first_tile(row_starts, middle, GROUP, BLOCK_ROWS) <= tile
        chunk = tl.where(is_before, middle, chunk)
        beyond = tl.where(is_before, beyond, middle)
    return chunk


# Arguments whose alignment varies: pointers into the step's tensors, and totals, which come after the highest scores.
_ANYWHERE = ["block_starts", "row_starts", "ends", "total"]


@triton.jit(do_not_specialize=["chunks", "splits", "window"], do_not_specialize_on_alignment=_ANYWHERE)
def attend_chunk(
    query,
    output,
    highest,
    total,
    data,
    scales,
    block_ids,
    block_starts,
    row_starts,
    ends,
    chunks,
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
    FORMAT: tl.constexpr,
    COMPUTED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    SINGLE: tl.constexpr,
):
    tile, kv_head, split = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    chunk = chunk_of(row_starts, chunks, tile, GROUP, BLOCK_ROWS)
    first_row = (tile - first_tile(row_starts, chunk, GROUP, BLOCK_ROWS)) * BLOCK_ROWS
    chunk_begin = tl.load(row_starts + chunk)
    tokens = (tl.load(row_starts + chunk + 1) - chunk_begin).to(tl.int32)
    if first_row >= tokens * GROUP:
        return
    context = tl.load(ends + chunk).to(tl.int32)
    start = context - tokens
    block_ids += tl.load(block_starts + chunk)
    rows, dims = first_row + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_DIM)
    chunk_tokens, heads = rows // GROUP, kv_head * GROUP + rows % GROUP
    positions = start + chunk_tokens
    real = chunk_tokens < tokens
    inside = real[:, None] & (dims < VALUE_DIM)[None, :]
    places = (chunk_begin + chunk_tokens) * HEADS + heads
    asked = tl.load(query + places[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0).to(COMPUTED)
    asked_rest = None
    if BLOCK_REST:
        rest_dims = VALUE_DIM + tl.arange(0, BLOCK_REST)
        inside_rest = real[:, None] & (rest_dims < HEAD_DIM)[None, :]
        asked_rest = tl.load(query + places[:, None] * HEAD_DIM + rest_dims[None, :], mask=inside_rest, other=0.0)
        asked_rest = asked_rest.to(COMPUTED)
    keys = data + kv_head * head_stride
    key_scales, value_scales = None, None
    if FORMAT != FLOAT:
        key_scales = scales + kv_head * scale_head_stride
        value_scales = key_scales + scale_part_stride

    first_position = start + first_row // GROUP
    last_position = tl.minimum(start + (first_row + BLOCK_ROWS - 1) // GROUP, context - 1)
    oldest = 0
    lowest = 0
    full_begin = 0
    full_end = (first_position + 1) // TILE * TILE  # without a window, every row sees all earlier tokens
    if WINDOWED:
        lowest = tl.maximum(first_position - window + 1, 0)
        oldest = lowest // TILE * TILE
        full_begin = tl.cdiv(tl.maximum(last_position - window + 1, 0), TILE) * TILE
        full_begin = tl.minimum(tl.maximum(full_begin, oldest), full_end)
    first, end = oldest, last_position + 1
    if not SINGLE:
        places = places * splits + split
        share = tl.cdiv(tl.cdiv(end - oldest, TILE), splits) * TILE
        first = oldest + split * share
        end = tl.minimum(first + share, end)
        if first >= end:  # the part is empty, since there are fewer tiles than parts; its output is never read
            tl.store(highest + places, float("-inf"), mask=real)
            tl.store(total + places, 0.0, mask=real)
            return

    most, sums = begun(sinks, heads, split == 0)
    attended = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    if WINDOWED:
        most, sums, attended = attend_tiles(
            most, sums, attended, asked, asked_rest, positions,
            keys, keys + part_stride, key_scales, value_scales, block_ids,
            first, tl.minimum(end, full_begin), lowest,
            context, factor, softcap, window, block_stride, scale_block_stride,
            HEAD_DIM, VALUE_DIM, BLOCK_DIM, BLOCK_REST, BLOCK_TOKENS,
            TILE, FORMAT, WINDOWED, SOFTCAPPED, True, not SINGLE,
        )  # fmt: skip
    most, sums, attended = attend_tiles(
        most, sums, attended, asked, asked_rest, positions,
        keys, keys + part_stride, key_scales, value_scales, block_ids,
        tl.maximum(first, full_begin), tl.minimum(end, full_end), lowest,
        context, factor, softcap, window, block_stride, scale_block_stride,
        HEAD_DIM, VALUE_DIM, BLOCK_DIM, BLOCK_REST, BLOCK_TOKENS, TILE, FORMAT, WINDOWED, SOFTCAPPED, False, not SINGLE,
    )  # fmt: skip
    most, sums, attended = attend_tiles(
        most, sums, attended, asked, asked_rest, positions,
        keys, keys + part_stride, key_scales, value_scales, block_ids,
        tl.maximum(first, full_end), end, lowest, context, factor, softcap, window, block_stride, scale_block_stride,
        HEAD_DIM, VALUE_DIM, BLOCK_DIM, BLOCK_REST, BLOCK_TOKENS, TILE, FORMAT, WINDOWED, SOFTCAPPED, True, not SINGLE,
    )  # fmt: skip
    target = output + places[:, None] * VALUE_DIM + dims[None, :]
    if SINGLE:
        tl.store(target, (attended / sums[:, None]).to(output.dtype.element_ty), mask=inside)
    else:
        tl.store(highest + places, most, mask=real)
        tl.store(total + places, sums, mask=real)
        tl.store(target, attended, mask=inside)
