"""Norms, rotation and the write into the pool in one launch: kernels/rotate_and_store.py on a GPU.

A program takes some heads of one token, as their two halves: what rotates together. Norms are rounded before their
weight, as in kernels/rms_norm.py; the rotation is in float32 and rounded once. A negative slot pads a batch: its
queries are made, nothing is written.
"""

import torch
import triton
import triton.language as tl

from kernels.kv_pages import KvLayer
from kernels.rotate_and_store import HeadNorms
from kernels.triton.call import KernelCall, power_of_two
from kernels.triton.formats import FLOAT, encoded, row_scales
from kernels.triton.launch import Device, device_of
from kernels.triton.store_kv import HEADS_AT_ONCE, pool_arguments


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: HeadNorms | None,
    kv: KvLayer,
    slots: torch.Tensor,
) -> torch.Tensor:
    tokens, heads, head_dim = qkv.shape
    query = qkv.new_empty(tokens, heads - 2 * kv.kv_heads, head_dim)
    rotate_call(qkv.contiguous(), cos.contiguous(), sin.contiguous(), norms, kv, slots, query, device_of(qkv)).start()
    return query


def rotate_call(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: HeadNorms | None,
    kv: KvLayer,
    slots: torch.Tensor,
    query: torch.Tensor,
    device: Device,
) -> KernelCall:
    tokens, heads, head_dim = query.shape
    query_programs, kv_programs = -(-heads // HEADS_AT_ONCE), -(-kv.kv_heads // HEADS_AT_ONCE)
    arguments = pool_arguments(kv, device) | {
        "qkv": qkv,
        "cos": cos,
        "sin": sin,
        "query_norm": None if norms is None else norms.query,
        "key_norm": None if norms is None else norms.key,
        "eps": 0.0 if norms is None else norms.eps,
        "slots": slots,
        "query": query,
        "HEADS": heads,
        "BLOCK_HALF": power_of_two(head_dim // 2),
        "QUERY_PROGRAMS": query_programs,
        "KV_PROGRAMS": kv_programs,
    }
    return KernelCall(rotate_rows, (tokens, query_programs + 2 * kv_programs), arguments, warps=1)


@triton.jit
def _normal(first, second, norm, eps, halves, inside, HALF: tl.constexpr):
    dtype: tl.constexpr = norm.dtype.element_ty
    mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
    factor = tl.rsqrt(mean + eps)[:, None]
    first_weight = tl.load(norm + halves, mask=inside, other=0.0).to(tl.float32)[None, :]
    second_weight = tl.load(norm + HALF + halves, mask=inside, other=0.0).to(tl.float32)[None, :]
    first = ((first * factor).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
    second = ((second * factor).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
    return first, second


@triton.jit
def _rotated(first, second, cos, sin, token, halves, inside, HALF: tl.constexpr):
    cosine = tl.load(cos + token * HALF + halves, mask=inside, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + token * HALF + halves, mask=inside, other=0.0).to(tl.float32)[None, :]
    return first * cosine - second * sine, second * cosine + first * sine


@triton.jit
def rotate_rows(
    qkv,
    cos,
    sin,
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
    BLOCK_HALF: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    QUERY_PROGRAMS: tl.constexpr,
    KV_PROGRAMS: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST_NUMBER: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    token, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    local, halves = tl.arange(0, HEADS_AT_ONCE), tl.arange(0, BLOCK_HALF)
    half_inside = halves < HALF
    base = qkv + token * (HEADS + 2 * KV_HEADS) * HEAD_DIM

    if program < QUERY_PROGRAMS:
        heads = program * HEADS_AT_ONCE + local
        inside = (heads < HEADS)[:, None] & half_inside[None, :]
        places = heads[:, None] * HEAD_DIM + halves[None, :]
        first = tl.load(base + places, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(base + HALF + places, mask=inside, other=0.0).to(tl.float32)
        if query_norm is not None:
            first, second = _normal(first, second, query_norm, eps, halves, half_inside, HALF)
        first, second = _rotated(first, second, cos, sin, token, halves, half_inside, HALF)
        target = query + token * HEADS * HEAD_DIM + places
        tl.store(target, first.to(query.dtype.element_ty), mask=inside)
        tl.store(target + HALF, second.to(query.dtype.element_ty), mask=inside)
        return

    slot = tl.load(slots + token)
    if slot < 0:
        return
    part = (program - QUERY_PROGRAMS) // KV_PROGRAMS  # 0: keys, 1: values
    heads = (program - QUERY_PROGRAMS - part * KV_PROGRAMS) * HEADS_AT_ONCE + local
    inside = (heads < KV_HEADS)[:, None] & half_inside[None, :]
    places = (HEADS + part * KV_HEADS + heads)[:, None] * HEAD_DIM + halves[None, :]
    first = tl.load(base + places, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(base + HALF + places, mask=inside, other=0.0).to(tl.float32)
    if part == 0:
        if key_norm is not None:
            first, second = _normal(first, second, key_norm, eps, halves, half_inside, HALF)
        first, second = _rotated(first, second, cos, sin, token, halves, half_inside, HALF)
        # Rounded to the dtype of the model before anything else, as the unfused operations have it.
        first = first.to(qkv.dtype.element_ty).to(tl.float32)
        second = second.to(qkv.dtype.element_ty).to(tl.float32)
    block, offset = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
    target = data + block * block_stride + part * part_stride + offset * HEAD_DIM
    target += heads[:, None] * head_stride + halves[None, :]
    if FORMAT == FLOAT:
        tl.store(target, first.to(data.dtype.element_ty), mask=inside)
        tl.store(target + HALF, second.to(data.dtype.element_ty), mask=inside)
    else:
        magnitudes = tl.maximum(tl.abs(first), tl.abs(second), propagate_nan=tl.PropagateNan.ALL)
        found = row_scales(magnitudes, LARGEST_NUMBER)
        tl.store(target, encoded(first, found, FORMAT, LARGEST_NUMBER), mask=inside)
        tl.store(target + HALF, encoded(second, found, FORMAT, LARGEST_NUMBER), mask=inside)
        scale_target = scales + block * scale_block_stride + part * scale_part_stride + offset
        tl.store(scale_target + heads * scale_head_stride, found, mask=heads < KV_HEADS)
