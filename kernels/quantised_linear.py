"""Rows times a weight of 8 or 4 bits that is never spelled out, and the spelling out for products of many rows."""

import torch

from kernels import reference
from kernels.check import check_dtype, check_shape
from kernels.on_triton import triton_kernels
from kernels.quantised_weight import QuantisedWeight


def quantised_linear(x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x: `[rows, inputs]`, float32, bfloat16 or float16; a new `[rows, outputs]` like it. For few rows: decode.

    bias: `[outputs]` of x's dtype. Products are of x and exact stored numbers, summed in float32; scales come after.
    """
    check_shape("x", x, None, weight.inputs)
    if bias is not None:
        check_shape("bias", bias, weight.outputs)
        check_dtype("bias", bias, x.dtype)
    kernels = triton_kernels(x)
    found: torch.Tensor = (reference if kernels is None else kernels).quantised_linear(x, weight, bias)
    return found


def dequantise_weight(weight: QuantisedWeight, dtype: torch.dtype) -> torch.Tensor:
    """A new `[outputs, inputs]` in `dtype`, rounded once from float32."""
    kernels = triton_kernels(weight.data)
    found: torch.Tensor = (reference if kernels is None else kernels).dequantise_weight(weight, dtype)
    return found
