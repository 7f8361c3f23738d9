"""Conversion between one-byte and wider numbers in Triton kernels. kernels/types.py defines the formats.

Encoding uses integer arithmetic, so that all GPUs and the interpreter write the same bits. Decoding uses the GPU's
instructions if it has them.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from baton.kernels.triton.launch import Device, as_bytes
from baton.kernels.types import LARGEST, KvLayer

FLOAT = tl.constexpr(0)  # numbers in the compute dtype, without scales
INT8 = tl.constexpr(1)
E4M3 = tl.constexpr(2)
E5M2 = tl.constexpr(3)
E4M3_BITS = tl.constexpr(4)  # E4M3 on a GPU without instructions that convert E4M3

_SMALLEST_SCALE = tl.constexpr(1.1754943508222875e-38)
_LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)
_ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding, then subtracting this rounds to an integer, half to even
_WITHOUT_SECOND_SIGN = tl.constexpr(-16385)  # 0xBFFF, mask that clears bit 14, a copy of the sign


def format_of(dtype: torch.dtype, device: Device) -> int:
    """Return the format, one of the constants above, of a tensor of `dtype` on `device`."""
    if dtype == torch.float8_e4m3fn:
        return int((E4M3 if device.has_e4m3 else E4M3_BITS).value)
    return int({torch.int8: INT8, torch.float8_e5m2: E5M2}.get(dtype, FLOAT).value)


def layer_arguments(kv: KvLayer, device: Device) -> dict[str, Any]:
    """Return the arguments for one layer of the pool, with the parameter names of all kernels that access it."""
    data, scales = as_bytes(kv.data), kv.scales
    if data.stride()[3:] != (kv.head_dim, 1) or (scales is not None and scales.stride(3) != 1):
        raise ValueError(f"the tokens of a block must be contiguous, got strides {list(data.stride())}")
    apart = kv.value_prefix is None  # False: values are prefixes of keys
    return {
        "data": data,
        "scales": scales,
        "block_stride": data.stride(0),
        "part_stride": data.stride(1) if apart else 0,
        "head_stride": data.stride(2),
        "scale_block_stride": 0 if scales is None else scales.stride(0),
        "scale_part_stride": scales.stride(1) if apart and scales is not None else 0,
        "scale_head_stride": 0 if scales is None else scales.stride(2),
        "HEAD_DIM": kv.head_dim,
        "BLOCK_TOKENS": kv.block_tokens,
        "FORMAT": format_of(kv.data.dtype, device),
    }


def largest_of(dtype: torch.dtype) -> float:
    """Return the number that represents a row's largest magnitude in `dtype`; 1 for dtypes without scales."""
    return LARGEST.get(dtype, 1.0)


@triton.jit
def widened(stored, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Convert stored numbers to `dtype`, without their scales. Exact in bfloat16 and wider dtypes."""
    if FORMAT == E4M3:
        wide = stored.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif FORMAT == E5M2:
        wide = stored.to(tl.float8e5, bitcast=True).to(dtype)
    elif FORMAT == E4M3_BITS:
        # Shift sign, exponent and mantissa to their positions in float16. The result is 2**-8 times the number.
        bits = stored.to(tl.int8, bitcast=True).to(tl.int16)
        halves = ((bits << 7) & _WITHOUT_SECOND_SIGN).to(tl.int16).to(tl.float16, bitcast=True)
        wide = (halves.to(tl.float32) * 256.0).to(dtype)
    else:
        wide = stored.to(dtype)
    return wide


@triton.jit
def row_scales(magnitudes, LARGEST_NUMBER: tl.constexpr):
    """Return the scales `[rows]` for float32 magnitudes `[rows, numbers]`; NaN if a row has a non-finite number."""
    infinite = tl.max((magnitudes <= _LARGEST_FLOAT).to(tl.int32) ^ 1, 1)
    scales = tl.maximum(tl.div_rn(tl.max(magnitudes, 1), LARGEST_NUMBER), _SMALLEST_SCALE)
    return tl.where(infinite > 0, float("nan"), scales)


@triton.jit
def encoded(wide, scales, FORMAT: tl.constexpr, LARGEST_NUMBER: tl.constexpr):
    """Quantise float32 `[rows, numbers]` with one scale per row, rounding half to even."""
    ratio = tl.div_rn(wide, scales[:, None])
    ratio = tl.minimum(tl.maximum(ratio, -LARGEST_NUMBER), LARGEST_NUMBER)
    if FORMAT == INT8:
        stored = ((ratio + _ROUNDING) - _ROUNDING).to(tl.int32).to(tl.int8)
    elif FORMAT == E5M2:
        stored = _small_float(ratio, 2, 15)
    else:
        stored = _small_float(ratio, 3, 7)
    return stored


@triton.jit
def _small_float(wide, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Encode float32 numbers, finite and within the format's range, as 8-bit floats; return the bits as uint8."""
    dropped: tl.constexpr = 23 - MANTISSA
    bits = wide.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    rounded = bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)
    normal = (rounded >> dropped) - ((127 - BIAS) << MANTISSA)
    # Numbers below the smallest normal number are multiples of one step. Adding a float whose last bit is worth one
    # step rounds to such a multiple.
    step_exponent: tl.constexpr = 1 - BIAS - MANTISSA
    anchor: tl.constexpr = (step_exponent + 23 + 127) << 23
    small = bits.to(tl.float32, bitcast=True) + tl.full(wide.shape, anchor, tl.int32).to(tl.float32, bitcast=True)
    subnormal = small.to(tl.int32, bitcast=True) - anchor
    code = tl.where(bits < ((128 - BIAS) << 23), subnormal, normal)
    return (sign | (code & 0x7F)).to(tl.uint8)
