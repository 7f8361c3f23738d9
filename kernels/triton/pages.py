"""Writes of keys and values, with rotation and quantisation, and copies of blocks: kernels/pages.py on a GPU."""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from baton.kernels.triton.formats import FLOAT, encoded, largest_of, layer_arguments, row_scales
from baton.kernels.triton.launch import COPY_BYTES, Device, KernelCall, device_of, power_of_two
from baton.kernels.triton.norms import normalised
from baton.kernels.types import HeadNorms, KvLayer, KvPages

HEADS_AT_ONCE = 4


def store_kv(kv: KvLayer, key: torch.Tensor, value: torch.Tensor | None, slots: torch.Tensor) -> None:
    keys = _rows(key)
    store_call(kv, keys, keys if value is None else _rows(value), slots, device_of(key)).start()


def store_call(kv: KvLayer, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, device: Device) -> KernelCall:
    arguments = pool_arguments(kv, device) | {
        "key": key,
        "value": value,
        "slots": slots,
        "key_stride": key.stride(0),
        "value_stride": value.stride(0),
        "BLOCK_DIM": power_of_two(kv.head_dim),
    }
    grid = (len(slots), -(-kv.kv_heads // HEADS_AT_ONCE), kv.kinds)
    return KernelCall(store_rows, grid, arguments, warps=1)


def pool_arguments(kv: KvLayer, device: Device) -> dict[str, Any]:
    """Return the arguments for one layer of the pool, with the names of the parameters of all kernels that write it."""
    return layer_arguments(kv, device) | {
        "KV_HEADS": kv.kv_heads,
        "HEADS_AT_ONCE": HEADS_AT_ONCE,
        "LARGEST_NUMBER": largest_of(kv.data.dtype),
    }


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return `x` if a token's heads are adjacent, as in a slice of a fused projection, else a contiguous copy."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


@triton.jit
def store_rows(
    key,
    value,
    slots,
    key_stride,
    value_stride,
    data,
    scales,
    block_stride,
    part_stride,
    head_stride,
    scale_block_stride,
    scale_part_stride,
    scale_head_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST_NUMBER: tl.constexpr,
):
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    heads = tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)
    dims = tl.arange(0, BLOCK_DIM)
    inside = (heads < KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    places = heads[:, None] * HEAD_DIM + dims[None, :]
    if part == 0:
        rows = tl.load(key + token * key_stride + places, mask=inside, other=0.0)
    else:
        rows = tl.load(value + token * value_stride + places, mask=inside, other=0.0)
    put_heads(
        rows, slot, part, heads, inside, dims, data, scales,
        block_stride, part_stride, head_stride, scale_block_stride, scale_part_stride, scale_head_stride,
        KV_HEADS, HEAD_DIM, BLOCK_TOKENS, FORMAT, LARGEST_NUMBER,
    )  # fmt: skip


@triton.jit
def put_heads(
    rows,  # [heads, dims]: numbers to write, any float dtype
    slot,
    part,  # 0: keys, 1: values
    heads,
    inside,
    dims,
    data,
    scales,
    block_stride,
    part_stride,
    head_stride,
    scale_block_stride,
    scale_part_stride,
    scale_head_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST_NUMBER: tl.constexpr,
):
    """Write keys or values of some heads of one token to its slot, quantised if the pool is."""
    block, offset = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
    target = data + block * block_stride + part * part_stride + offset * HEAD_DIM
    target += heads[:, None] * head_stride + dims[None, :]
    if FORMAT == FLOAT:
        tl.store(target, rows.to(data.dtype.element_ty), mask=inside)
    else:
        wide = rows.to(tl.float32)
        found = row_scales(tl.abs(wide), LARGEST_NUMBER)
        tl.store(target, encoded(wide, found, FORMAT, LARGEST_NUMBER), mask=inside)
        scale_target = scales + block * scale_block_stride + part * scale_part_stride + offset
        tl.store(scale_target + heads * scale_head_stride, found, mask=heads < KV_HEADS)


class Turning(NamedTuple):
    """Arguments of `rotate_and_store`: norms and angles for queries and keys, and slots for keys and values."""

    cos: torch.Tensor
    sin: torch.Tensor
    angle_rows: torch.Tensor | None
    norms: HeadNorms | None
    slots: torch.Tensor

    def arguments(self) -> dict[str, Any]:
        """Return the arguments with the names of the parameters of all kernels that rotate and store."""
        norms = self.norms
        return {
            "cos": self.cos.contiguous(),
            "sin": self.sin.contiguous(),
            "angle_rows": self.angle_rows,
            "query_norm": None if norms is None else norms.query,
            "key_norm": None if norms is None else norms.key,
            "eps": 0.0 if norms is None else norms.eps,
            "slots": self.slots,
            "ANGLES": self.cos.shape[1],
        }


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: HeadNorms | None,
    kv: KvLayer,
    slots: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute kernels/pages.py's operation. Each program computes some heads of one token.

    Norms are rounded before they are multiplied by their weights, as in kernels/norms.py. The rotation is in float32
    and rounded once. Queries are also computed for padding rows.
    """
    tokens, heads, head_dim = qkv.shape
    query = qkv.new_empty(tokens, heads - 2 * kv.kv_heads, head_dim)
    rotate_call(qkv.contiguous(), Turning(cos, sin, rows, norms, slots), kv, query, device_of(qkv)).start()
    return query


def rotate_call(qkv: torch.Tensor, turning: Turning, kv: KvLayer, query: torch.Tensor, device: Device) -> KernelCall:
    tokens, heads, head_dim = query.shape
    query_programs, kv_programs = -(-heads // HEADS_AT_ONCE), -(-kv.kv_heads // HEADS_AT_ONCE)
    arguments = pool_arguments(kv, device) | turning.arguments()
    arguments |= {
        "qkv": qkv,
        "query": query,
        "HEADS": heads,
        "BLOCK_DIM": power_of_two(head_dim),
        "QUERY_PROGRAMS": query_programs,
        "KV_PROGRAMS": kv_programs,
    }
    return KernelCall(rotate_rows, (tokens, query_programs + 2 * kv_programs), arguments, warps=1)


@triton.jit
def turned(sources, inside, norm, eps, cos, sin, dims, HEAD_DIM: tl.constexpr, ANGLES: tl.constexpr):
    """Load heads at `sources`, normalise them unless `norm` is None, and rotate them; return float32 `[heads, dims]`.

    cos, sin: pointers to the token's cosines and sines. The two numbers of a rotated pair are ANGLES apart. Each number
    is read twice: for its own result, and for that of the other number of its pair.
    """
    is_first, real, rotates = dims < ANGLES, dims < HEAD_DIM, dims < 2 * ANGLES
    angles = tl.where(is_first, dims, dims - ANGLES)
    partners = tl.where(is_first, dims + ANGLES, dims - ANGLES)
    own = tl.load(sources[:, None] + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(sources[:, None] + partners[None, :], mask=inside, other=0.0).to(tl.float32)
    if norm is not None:
        mean = (tl.sum(own * own, 1) / HEAD_DIM)[:, None]
        own_factors = tl.load(norm + dims, mask=real, other=0.0).to(tl.float32)[None, :]
        other_factors = tl.load(norm + partners, mask=real, other=0.0).to(tl.float32)[None, :]
        stored: tl.constexpr = norm.dtype.element_ty
        dtype: tl.constexpr = sources.dtype.element_ty
        own = normalised(own, mean, own_factors, eps, stored, dtype).to(tl.float32)
        other = normalised(other, mean, other_factors, eps, stored, dtype).to(tl.float32)
    cosine = tl.load(cos + angles, mask=rotates, other=1.0).to(tl.float32)
    sine = tl.load(sin + angles, mask=rotates, other=0.0).to(tl.float32)
    return own * cosine[None, :] + other * tl.where(is_first, -sine, sine)[None, :]


@triton.jit
def rotate_rows(
    qkv,
    cos,
    sin,
    angle_rows,
    query_norm,
    key_norm,
    eps,
    slots,
    query,
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
    BLOCK_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    ANGLES: tl.constexpr,
    QUERY_PROGRAMS: tl.constexpr,
    KV_PROGRAMS: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST_NUMBER: tl.constexpr,
):
    token, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    local, dims = tl.arange(0, HEADS_AT_ONCE), tl.arange(0, BLOCK_DIM)
    base = qkv + token * (HEADS + 2 * KV_HEADS) * HEAD_DIM
    angle = token
    if angle_rows is not None:
        angle = tl.load(angle_rows + token)
    cos, sin = cos + angle * ANGLES, sin + angle * ANGLES

    if program < QUERY_PROGRAMS:
        heads = program * HEADS_AT_ONCE + local
        inside = (heads < HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
        rows = turned(base + heads * HEAD_DIM, inside, query_norm, eps, cos, sin, dims, HEAD_DIM, ANGLES)
        target = query + (token * HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(target, rows.to(query.dtype.element_ty), mask=inside)
        return

    slot = tl.load(slots + token)
    if slot < 0:
        return
    part = (program - QUERY_PROGRAMS) // KV_PROGRAMS  # 0: keys, 1: values
    heads = (program - QUERY_PROGRAMS - part * KV_PROGRAMS) * HEADS_AT_ONCE + local
    inside = (heads < KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    sources = base + (HEADS + part * KV_HEADS + heads) * HEAD_DIM
    if part == 0:
        # Round to the model's dtype first and then to the pool's format, as the unfused operations do.
        rows = turned(sources, inside, key_norm, eps, cos, sin, dims, HEAD_DIM, ANGLES).to(qkv.dtype.element_ty)
    else:
        rows = tl.load(sources[:, None] + dims[None, :], mask=inside, other=0.0)
    put_heads(
        rows, slot, part, heads, inside, dims, data, scales,
        block_stride, part_stride, head_stride, scale_block_stride, scale_part_stride, scale_head_stride,
        KV_HEADS, HEAD_DIM, BLOCK_TOKENS, FORMAT, LARGEST_NUMBER,
    )  # fmt: skip


_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def gather_blocks(blocks: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor) -> None:
    copy_call(blocks, block_ids, out, None, len(block_ids)).start()


def scatter_blocks(source: torch.Tensor, blocks: torch.Tensor, block_ids: torch.Tensor) -> None:
    copy_call(source, None, blocks, block_ids, len(block_ids)).start()


def copy_blocks(kv: KvPages, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    for part in (kv.data, kv.scales):
        if part is not None:
            # One row per layer, kind and head. view() raises if this would need a copy.
            rows = part.view(torch.uint8).view(kv.blocks, kv.layers * kv.kinds * kv.kv_heads, -1)
            copy_call(rows, sources, rows, destinations, len(sources)).start()


def compile_copies(blocks: torch.Tensor, piece: torch.Tensor) -> None:
    ids = torch.zeros(1, dtype=torch.int64, device=blocks.device)
    copy_call(blocks, ids, piece, None, 1).compile()
    copy_call(piece, None, blocks, ids, 1).compile()


def copy_call(
    source: torch.Tensor,
    source_ids: torch.Tensor | None,
    target: torch.Tensor,
    target_ids: torch.Tensor | None,
    copies: int,
) -> KernelCall:
    """Build the call that copies block `source_ids[i]` to block `target_ids[i]`. If ids are None, use block i.

    source, target: uint8 `[blocks, rows, row_bytes]`: one row per contiguous block, or several rows if only some heads
    are copied. Copies use the widest word to which all addresses are aligned. A program copies COPY_BYTES of a row.
    """
    if source.shape[1:] != target.shape[1:] or source.stride(2) != 1 or target.stride(2) != 1:
        raise ValueError(
            f"rows of {list(source.shape)} and {list(target.shape)} must have equal shapes and be contiguous"
        )
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
