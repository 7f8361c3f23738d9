"""Layers of experts (arXiv:2401.04088): which ones a row takes, products with theirs, and a whole layer."""

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
    """The likeliest experts of each row, and the share of its result that each makes.

    numbers: float32 `[rows, experts]`, the router's; correction: float32 `[experts]`. Of experts that are as good as
    each other, any is taken.
    """
    check_shape("numbers", numbers, None, None)
    check_dtype("numbers", numbers, torch.float32)
    if correction is not None:
        check_shape("correction", correction, numbers.shape[1])
        check_dtype("correction", correction, torch.float32)
    return pick(reference.choose_experts, numbers)(numbers, routing, correction)


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
    return pick(reference.expert_linear, x)(x, weight, pairs)


def packed_experts(x: torch.Tensor, mixture: PackedExperts) -> torch.Tensor:
    """A layer of experts with packed weights; a new float32 `[rows, hidden]`. Weights that no row takes are not read.

    x: float32 `[rows, hidden]`. Each row is the sum of what its experts make of it, times their weights, in the order
    of the experts, and then what `shared` makes of it. No row's result depends on its neighbours.
    """
    check_shape("x", x, None, mixture.router.inputs)
    check_dtype("x", x, torch.float32)
    return pick(reference.packed_experts, x)(x, mixture)
