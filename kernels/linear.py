"""Products of rows with packed or quantised weights, and lookup of rows of a packed weight."""

import torch

from baton.kernels import reference
from baton.kernels.dispatch import launchers, pick, uses_triton
from baton.kernels.packed_weight import PANEL, PackedWeight, Stored
from baton.kernels.types import Gate, QuantisedWeight, check_dtype, check_index, check_norm, check_shape

FLOATS = (Stored.FLOAT32, Stored.BFLOAT16, Stored.ROUNDING)  # formats that keep the packed numbers exactly
GATHERED = (*FLOATS, Stored.CODE4, Stored.CODE8)  # formats whose rows can be looked up


def packed_linear(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Multiply x, float32 `[rows, inputs]`, by `weight`; returns a new float32 `[rows, outputs]`.

    No row's result depends on other rows. If a row of x has a non-finite value, its result has no finite number.
    """
    check_shape("x", x, None, weight.inputs)
    check_dtype("x", x, torch.float32)
    return pick(reference.packed_linear, x)(x, weight)


def head_linear(x: torch.Tensor, weight: PackedWeight, heads: int) -> torch.Tensor:
    """Multiply x, float32 `[rows, heads, inputs]`, by one weight per head; returns float32 `[rows, heads, outputs]`.

    weight: weights of all heads, concatenated, each with a multiple of PANEL outputs, in a format of FLOATS and without
    a bias. No row's result depends on other rows.
    """
    check_shape("x", x, None, heads, weight.inputs)
    check_dtype("x", x, torch.float32)
    if weight.outputs % (heads * PANEL) or weight.bias is not None or weight.stored not in FLOATS:
        raise ValueError(
            f"a weight per head needs a float format, no bias and a multiple of {heads * PANEL} outputs, got "
            f"{weight.stored.name}{'' if weight.bias is None else ' with a bias'} and {weight.outputs} outputs"
        )
    return pick(reference.head_linear, x)(x, weight, heads)


def quantised_linear(x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply x, a few rows `[rows, inputs]`, by `weight`; returns `[rows, outputs]` in x's dtype.

    x: float32, bfloat16 or float16; bias: `[outputs]` in x's dtype. Products of x and the unscaled stored numbers are
    summed in float32, then scaled.
    """
    check_shape("x", x, None, weight.inputs)
    if bias is not None:
        check_shape("bias", bias, weight.outputs)
        check_dtype("bias", bias, x.dtype)
    return pick(reference.quantised_linear, x)(x, weight, bias)


def takes_fused(x: torch.Tensor, weight: torch.Tensor | QuantisedWeight) -> bool:
    """Return whether `fused_linear` is faster than separate operations: few rows on a GPU, and a supported weight."""
    if not uses_triton(x) or not 0 < len(x) <= launchers().most_fused_rows(x):
        return False
    return weight.is_contiguous() if isinstance(weight, torch.Tensor) else not weight.has_codes


def fused_linear(
    x: torch.Tensor,
    weight: torch.Tensor | QuantisedWeight,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gate: Gate | None = None,
    out: torch.Tensor | None = None,
    adds: bool = False,
) -> torch.Tensor:
    """Compute norm, product, bias, gate and sum in one kernel; returns `out`, or a new tensor. Requires `takes_fused`.

    x: `[rows, inputs]`; weight: `[outputs, inputs]` in x's dtype, or 8-bit; bias: `[outputs]`. norm: `[inputs]`,
    applied to the rows before the product, by `rms_norm`. gate: applied to the product, by `gate_mul`. out: contiguous
    `[rows, outputs]`, or `[rows, outputs / 2]` with a gate. adds: whether the result is added to `out`
    instead of replacing it. Every step is rounded like a separate operation.
    """
    outputs, inputs = weight.shape if isinstance(weight, torch.Tensor) else (weight.outputs, weight.inputs)
    check_shape("x", x, None, inputs)
    if isinstance(weight, torch.Tensor):
        check_dtype("weight", weight, x.dtype)
    if norm is not None:
        check_norm("norm", norm, x)
    if bias is not None:
        check_shape("bias", bias, outputs)
        check_dtype("bias", bias, x.dtype)
    if gate is not None and outputs % 2:
        raise ValueError(f"with a gate the number of outputs must be even, got {outputs}")
    if out is not None:
        check_shape("out", out, len(x), outputs if gate is None else outputs // 2)
        check_dtype("out", out, x.dtype)
        if not out.is_contiguous():
            raise ValueError(f"out must be contiguous, got strides {list(out.stride())}")
    return pick(reference.fused_linear, x)(x, weight, bias, norm, eps, gate, out, adds)


def dequantise_weight(weight: QuantisedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise `weight` to a new `[outputs, inputs]` in `dtype`, rounded once from float32."""
    return pick(reference.dequantise_weight, weight.data)(weight, dtype)


def gather_rows(token_ids: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Look up the rows of `weight` for `token_ids`: int64 `[tokens]`, row indices in any order, possibly repeated.

    Returns a new contiguous float32 `[tokens, inputs]` with the packed numbers, dequantised if they are codes. Raises:
    ValueError if the format of `weight` is not in GATHERED, IndexError for an invalid id.
    """
    check_index("token_ids", token_ids)
    if weight.stored not in GATHERED:
        raise ValueError(f"rows cannot be looked up in a weight stored as {weight.stored.name}")
    return pick(reference.gather_rows, token_ids)(token_ids, weight)
