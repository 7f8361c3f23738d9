"""Rows times weights, packed, quantised or of experts; and rows of a packed weight as they were."""

import torch

from baton.kernels import reference
from baton.kernels.native.library import native_library
from baton.kernels.on_triton import triton_kernels
from baton.kernels.packed_weight import PackedWeight, Stored
from baton.kernels.types import ExpertWeight, QuantisedWeight, SortedPairs, check_dtype, check_index, check_shape


def packed_linear(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """x: float32 `[rows, inputs]`; a new float32 `[rows, outputs]`. No row's result depends on its neighbours.

    A row with anything in it that is not finite has no finite result.
    """
    check_shape("x", x, None, weight.inputs)
    check_dtype("x", x, torch.float32)
    native = native_library()
    if native is not None and x.device.type == "cpu":
        return native.layers.linear(x, weight)
    return reference.packed_linear(x, weight)


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


def expert_linear(x: torch.Tensor, weight: ExpertWeight, pairs: SortedPairs) -> torch.Tensor:
    """A new `[pairs, outputs]` like x: of every pair, in the order of their numbers, its row through its expert.

    x: `[rows, inputs]`, float32, bfloat16 or float16, of which pairs are a multiple. Sums are float32; scales come
    after. Weights of experts that no row was given to are not read.
    """
    check_shape("x", x, None, weight.inputs)
    check_index("order", pairs.order)
    check_index("starts", pairs.starts, weight.experts + 1)
    if len(x) == 0 or len(pairs.order) % len(x):
        raise ValueError(f"{len(pairs.order)} pairs are not as many for each of {len(x)} rows")
    kernels = triton_kernels(x)
    found: torch.Tensor = (reference if kernels is None else kernels).expert_linear(x, weight, pairs)
    return found


GATHERED = (Stored.FLOAT32, Stored.BFLOAT16, Stored.ROUNDING)  # others are no longer the numbers that were packed


def gather_rows(token_ids: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """token_ids: int64 `[tokens]`, outputs of `weight`, in any order, also several times.

    Returns float32 `[tokens, inputs]`, contiguous, of its own memory: the numbers that were packed, bit by bit. Raises:
    ValueError for a weight of integers, IndexError for an id that is no output.
    """
    check_index("token_ids", token_ids)
    if weight.stored not in GATHERED:
        raise ValueError(f"rows of a weight stored as {weight.stored.name} are not gathered")
    native = native_library()
    if native is not None and token_ids.device.type == "cpu":
        return native.layers.gather_rows(token_ids, weight)
    return reference.gather_rows(token_ids, weight)
