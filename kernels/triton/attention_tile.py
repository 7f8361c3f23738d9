"""Code that both attention kernels on a GPU share: attention to tiles of a context, and the split of a context."""

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from baton.kernels.triton.formats import FLOAT, layer_arguments, widened
from baton.kernels.triton.launch import Device, power_of_two
from baton.kernels.types import KvLayer, Scoring

MAX_SPLITS = 128  # maximum number of parts of a context, whose results one program combines
START_TILES = 2  # estimated time to start a program and its first loads; unit: time to process a tile
COMBINE_TILES = 4  # estimated time to combine the results of parts, in the same unit


@functools.cache
def context_splits(pairs: int, tiles: int, multiprocessors: int, filling: int) -> int:
    """Return the fastest number of parts into which to split a context, by an estimate; the smallest of equal ones.

    pairs: number of programs without a split, which is KV heads times sequences, or times tiles of a prompt's rows;
    tiles: number of tiles of a context; filling: number of programs that saturate a multiprocessor's memory bandwidth.
    Many pairs already fill the device, and every further part costs time: TileOPs measured on an H200 that too many
    parts cost a third of the speed at a large batch.
    """
    best, least = 1, math.inf
    for splits in range(1, max(1, min(tiles, MAX_SPLITS)) + 1):
        share = max(-(-pairs * splits // multiprocessors), filling)  # number of programs of the busiest multiprocessor
        time = share * (-(-tiles // splits) + START_TILES) + (COMBINE_TILES if splits > 1 else 0)
        if time < least:
            best, least = splits, time
    return best


LOG2E = math.log2(math.e)
_LOG2E = tl.constexpr(LOG2E)


class PagedArguments(NamedTuple):
    """Arguments for the pool and the scores, by their parameter names in both paged attention kernels."""

    arguments: dict[str, Any]
    itemsize: int  # bytes of a number in the dtype of the computation


def paged_arguments(query: torch.Tensor, kv: KvLayer, scoring: Scoring, device: Device) -> PagedArguments:
    """Build the arguments for pool and scores. query: `[..., heads, head_dim]`. Raises: ValueError if unsupported."""
    if scoring.scale <= 0:
        raise ValueError(f"scale must be positive, got {scoring.scale}")
    heads = query.shape[-2]
    # A quantised pool is computed in bfloat16, in which 8-bit numbers are exact. Scales are applied in float32, later.
    computed = torch.bfloat16 if kv.scales is not None and query.dtype == torch.float16 else query.dtype
    factor, softcap = scoring.scale * LOG2E, 0.0
    if scoring.softcap is not None:
        # The kernel computes tanh(x) as 1 - 2 / (1 + exp(2x)).
        factor, softcap = 2 * factor / scoring.softcap, scoring.softcap * LOG2E
    return PagedArguments(
        layer_arguments(kv, device)
        | {
            "query": query,
            "sinks": scoring.sinks,
            "factor": factor,
            "softcap": softcap,
            "window": scoring.window or 0,
            "HEADS": heads,
            "GROUP": heads // kv.kv_heads,
            "VALUE_DIM": kv.value_dim,
            "BLOCK_DIM": max(16, power_of_two(kv.value_dim)),
            "BLOCK_REST": max(16, power_of_two(kv.head_dim - kv.value_dim)) if kv.head_dim > kv.value_dim else 0,
            "COMPUTED": _TRITON_DTYPES[computed],
            "WINDOWED": scoring.window is not None,
            "SOFTCAPPED": scoring.softcap is not None,
        },
        computed.itemsize,
    )


_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def attend_tiles(
    highest,  # float32 [rows]: highest of all scores so far
    total,  # float32 [rows]: sum of weights so far, relative to 2**highest
    attended,  # float32 [rows, dims]: sum of weighted values so far
    query,  # [rows, dims]: multiplied by all numbers of a key, or by those of its value prefix
    rest_query,  # [rows, rest]: multiplied by the other numbers of a key, or None
    positions,  # int32 [rows]
    keys,  # pointers to this KV head's numbers in block 0 of the pool
    values,
    key_scales,  # pointers like `keys`, or None for an unquantised pool
    value_scales,
    block_ids,  # pointer to the sequence's first block id
    first,  # first position of the tokens to process, a multiple of TILE
    end,  # position after the last token to process
    lowest,  # first visible position; blocks before it may belong to another sequence
    context,  # number of tokens with KV
    factor,
    softcap,
    window,
    block_stride,
    scale_block_stride,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    MASKED: tl.constexpr,  # whether some of the tokens to process may be invisible to a row
    PARTED: tl.constexpr,  # whether all tokens of the program's part may be invisible to a row
):
    dims = tl.arange(0, BLOCK_DIM)
    # Load block ids one tile ahead, so that the loads of keys do not wait for block ids. Triton still issues the load
    # of ids before the loads of each tile, which costs an estimated 0.3 to 0.5 µs, noticeable only at batch 1.
    blocks = _blocks(block_ids, first, lowest, context, BLOCK_TOKENS, TILE)
    for begin in range(first, end, TILE):
        next_blocks = _blocks(block_ids, begin + TILE, lowest, context, BLOCK_TOKENS, TILE)
        tokens = begin + tl.arange(0, TILE)
        # For positions after the context, load its last token; for positions before the window, load its first token.
        # The slots of these positions may contain NaN, and 0 * NaN is NaN.
        places = tokens
        if MASKED:
            places = tl.minimum(places, context - 1)
            if WINDOWED:
                places = tl.maximum(places, lowest)
        inside = places % BLOCK_TOKENS
        begins = blocks.to(tl.int64) * block_stride + inside * HEAD_DIM
        offsets = begins[:, None] + dims[None, :]
        if VALUE_DIM == BLOCK_DIM:
            key = tl.load(keys + offsets)
        else:
            key = tl.load(keys + offsets, mask=(dims < VALUE_DIM)[None, :], other=0)
        if rest_query is not None:
            value = key
        elif VALUE_DIM == BLOCK_DIM:
            value = tl.load(values + offsets)
        else:
            value = tl.load(values + offsets, mask=(dims < VALUE_DIM)[None, :], other=0)

        scores = tl.dot(query, tl.trans(widened(key, FORMAT, query.dtype)), input_precision="ieee")
        if rest_query is not None:
            rest_dims = VALUE_DIM + tl.arange(0, BLOCK_REST)
            rest_offsets = begins[:, None] + rest_dims[None, :]
            if VALUE_DIM + BLOCK_REST == HEAD_DIM:
                rest = tl.load(keys + rest_offsets)
            else:
                rest = tl.load(keys + rest_offsets, mask=(rest_dims < HEAD_DIM)[None, :], other=0)
            rest_key = tl.trans(widened(rest, FORMAT, query.dtype))
            scores = tl.dot(rest_query, rest_key, scores, input_precision="ieee")
        if FORMAT != FLOAT:
            scale_offsets = blocks.to(tl.int64) * scale_block_stride + inside
            scores = scores * tl.load(key_scales + scale_offsets)[None, :]
        if SOFTCAPPED:
            scores = softcap - 2.0 * softcap / (1.0 + tl.exp2(scores * factor))
        if MASKED:
            visible = tokens[None, :] <= positions[:, None]
            if WINDOWED:
                visible = visible & (tokens[None, :] > positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))

        # Without softcap, multiply by the factor only here: product and subtraction are then one instruction.
        step = 1.0 if SOFTCAPPED else factor
        higher = tl.maximum(highest, tl.max(scores, 1) * step)
        if MASKED and (WINDOWED or PARTED):
            lowered = tl.where(higher == float("-inf"), 0.0, higher)  # -inf: the row has seen no token yet
        else:
            lowered = higher
        weights = tl.exp2(scores * step - lowered[:, None])
        kept = tl.exp2(highest - lowered)
        total = total * kept + tl.sum(weights, 1)
        attended = attended * kept[:, None]
        if FORMAT != FLOAT:
            weights = weights * tl.load(value_scales + scale_offsets)[None, :]
        wide = widened(value, FORMAT, query.dtype)
        attended = tl.dot(weights.to(query.dtype), wide, attended, input_precision="ieee")
        highest = higher
        blocks = next_blocks
    return highest, total, attended


@triton.jit
def begun(sinks, heads, first_part):
    """Return the initial highest score and sum of weights, per row. Only a context's first part includes the sink."""
    if sinks is None:
        highest = tl.full(heads.shape, float("-inf"), tl.float32)
        total = tl.zeros(heads.shape, tl.float32)
    else:
        highest = tl.where(first_part, tl.load(sinks + heads) * _LOG2E, float("-inf"))
        total = tl.where(first_part, 1.0, 0.0) + tl.zeros(heads.shape, tl.float32)
    return highest, total


@triton.jit
def _blocks(block_ids, begin, lowest, context, BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr):
    """Return the block id of each token of the tile that starts at `begin`; only one id if a tile is within one block.

    Block ids are int32, which takes half the registers of int64. They are small; only offsets need int64.
    """
    if BLOCK_TOKENS % TILE == 0:
        blocks = tl.load(block_ids + tl.minimum(begin, context - 1) // BLOCK_TOKENS)
    else:
        tokens = tl.maximum(tl.minimum(begin + tl.arange(0, TILE), context - 1), lowest)
        blocks = tl.load(block_ids + tokens // BLOCK_TOKENS)
    return blocks.to(tl.int32)
