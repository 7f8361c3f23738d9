"""Layers of experts (arXiv:2401.04088): choice of experts, their products, and a complete layer."""

import torch

from baton.kernels import reference
from baton.kernels.dispatch import pick
from baton.kernels.packed_weight import PackedExperts
from baton.kernels.types import (
    ExpertChoice,
    ExpertWeight,
    Routing,
    SortedPairs,
    check_dtype,
    check_index,
    check_shape,
)


def choose_experts(numbers: torch.Tensor, routing: Routing, correction: torch.Tensor | None) -> ExpertChoice:
    """Choose the best experts of each row and their weights.

    numbers: float32 `[rows, experts]`, the router's logits; correction: float32 `[experts]`. Ties are broken
    arbitrarily.
    """
    check_shape("numbers", numbers, None, None)
    check_dtype("numbers", numbers, torch.float32)
    if correction is not None:
        check_shape("correction", correction, numbers.shape[1])
        check_dtype("correction", correction, torch.float32)
    return pick(reference.choose_experts, numbers)(numbers, routing, correction)


def expert_linear(x: torch.Tensor, weight: ExpertWeight, pairs: SortedPairs) -> torch.Tensor:
    """Compute each pair's row through its expert; returns a new `[pairs, outputs]` like x, in order of pair number.

    x: `[rows, inputs]`, float32, bfloat16 or float16; the number of pairs is a multiple of rows. Sums are float32,
    scaled afterwards. Weights of experts without rows are not read.
    """
    check_shape("x", x, None, weight.inputs)
    check_index("order", pairs.order)
    check_index("starts", pairs.starts, weight.experts + 1)
    if len(x) == 0 or len(pairs.order) % len(x):
        raise ValueError(f"{len(pairs.order)} pairs are not a multiple of {len(x)} rows")
    return pick(reference.expert_linear, x)(x, weight, pairs)


def packed_experts(x: torch.Tensor, mixture: PackedExperts) -> torch.Tensor:
    """Compute a layer of experts with packed weights, reading only used ones; returns float32 `[rows, hidden]`.

    x: float32 `[rows, hidden]`. Each row is the weighted sum of its experts' outputs, in the order of experts, then of
    `shared`. No row's result depends on its neighbours.
    """
    check_shape("x", x, None, mixture.router.inputs)
    check_dtype("x", x, torch.float32)
    return pick(reference.packed_experts, x)(x, mixture)
