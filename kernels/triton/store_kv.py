"""Keys and values into their slots, quantised on the way where the pool is: kernels/store_kv.py on a GPU.

A negative slot pads a batch: nothing is written for it.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.kv_pages import KvLayer
from kernels.triton.call import KernelCall, as_bytes, power_of_two
from kernels.triton.formats import FLOAT, encoded, format_of, largest_of, row_scales
from kernels.triton.launch import Device, device_of

HEADS_AT_ONCE = 4


def store_kv(kv: KvLayer, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    store_call(kv, _rows(key), _rows(value), slots, device_of(key)).start()


def store_call(kv: KvLayer, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, device: Device) -> KernelCall:
    arguments = pool_arguments(kv, device) | {
        "key": key,
        "value": value,
        "slots": slots,
        "key_stride": key.stride(0),
        "value_stride": value.stride(0),
        "BLOCK_DIM": power_of_two(kv.head_dim),
    }
    grid = (len(slots), -(-kv.kv_heads // HEADS_AT_ONCE), 2)
    return KernelCall(store_rows, grid, arguments, warps=1)


def pool_arguments(kv: KvLayer, device: Device) -> dict[str, Any]:
    """The arguments for one layer of the pool, of every kernel that writes it."""
    scales = kv.scales
    if kv.data.stride(3) != kv.head_dim or kv.data.stride(4) != 1 or (scales is not None and scales.stride(3) != 1):
        raise ValueError(f"the tokens of a block must be contiguous, got strides {list(kv.data.stride())}")
    return {
        "data": as_bytes(kv.data),
        "scales": scales,
        "block_stride": kv.data.stride(0),
        "part_stride": kv.data.stride(1),
        "head_stride": kv.data.stride(2),
        "scale_block_stride": 0 if scales is None else scales.stride(0),
        "scale_part_stride": 0 if scales is None else scales.stride(1),
        "scale_head_stride": 0 if scales is None else scales.stride(2),
        "KV_HEADS": kv.kv_heads,
        "HEAD_DIM": kv.head_dim,
        "BLOCK_TOKENS": kv.block_tokens,
        "HEADS_AT_ONCE": HEADS_AT_ONCE,
        "FORMAT": format_of(kv.data.dtype, device),
        "LARGEST_NUMBER": largest_of(kv.data.dtype),
    }


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Heads of a token side by side; slices of a fused projection are taken as they are."""
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
