"""Rows times weights of the experts that each was given to: a mixture of experts in one launch."""

import torch

from kernels import reference
from kernels.check import check_index, check_shape
from kernels.expert_weight import ExpertWeight, SortedPairs
from kernels.on_triton import triton_kernels


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
