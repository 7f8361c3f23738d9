"""Mixture-of-experts layers (arXiv:2401.04088): choice of experts, their products, and a complete layer."""

import torch

from baton.kernels import reference
from baton.kernels.dispatch import pick
from baton.kernels.packed_weight import PackedExperts
from baton.kernels.types import ExpertChoice, ExpertWeight, Routing, SortedPairs, check_dtype, check_index, check_shape


def choose_experts(numbers: torch.Tensor, routing: Routing, correction: torch.Tensor | None) -> ExpertChoice:
    """Choose for each row the experts with the highest gate values; returns the experts and their weights.

    numbers: float32 `[rows, experts]`, logits of the layer's router; correction: float32 `[experts]`, see `Routing`.
    Ties are broken arbitrarily.
    """
    check_shape("numbers", numbers, None, None)
    check_dtype("numbers", numbers, torch.float32)
    if correction is not None:
        check_shape("correction", correction, numbers.shape[1])
        check_dtype("correction", correction, torch.float32)
    return pick(reference.choose_experts, numbers)(numbers, routing, correction)


def expert_linear(x: torch.Tensor, weight: ExpertWeight, pairs: SortedPairs) -> torch.Tensor:
    """Multiply each row by the weight of each of its experts; returns `[pairs, outputs]`.

    A pair is a row and one of its experts. x: `[rows, inputs]`, float32, bfloat16 or float16; the result has the same
    dtype. The number of pairs is a multiple of the number of rows. Products are summed in float32, and then scaled.
    Weights of experts without rows are not read.
    """
    check_shape("x", x, None, weight.inputs)
    check_index("order", pairs.order)
    check_index("starts", pairs.starts, weight.experts + 1)
    if len(x) == 0 or len(pairs.order) % len(x):
        raise ValueError(f"{len(pairs.order)} pairs are not a multiple of {len(x)} rows")
    return pick(reference.expert_linear, x)(x, weight, pairs)


def packed_experts(x: torch.Tensor, mixture: PackedExperts) -> torch.Tensor:
    """Compute a layer of experts, reading only weights of chosen experts; returns float32 `[rows, hidden]`.

    x: float32 `[rows, hidden]`. A row's result is the weighted sum of its experts' outputs, in the order of experts,
    plus the output of `shared`. No row's result depends on other rows.
    """
    check_shape("x", x, None, mixture.router.inputs)
    check_dtype("x", x, torch.float32)
    return pick(reference.packed_experts, x)(x, mixture)
