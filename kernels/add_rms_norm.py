"""A layer's output added to the residual stream, and the norm before the next layer, in one go."""

import torch

from kernels.check import check_dtype, check_shape
from kernels.on_triton import triton_kernels
from kernels.rms_norm import rms_norm


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds `x` to `residual` in place and returns `rms_norm(residual, weight, eps)`: see rms_norm.py.

    x, residual: `[..., size]`, alike; residual contiguous. What is normalised is the sum, rounded to their dtype.
    """
    check_shape("residual", residual, *x.shape)
    check_shape("weight", weight, x.shape[-1])
    for name, tensor in (("residual", residual), ("weight", weight)):
        check_dtype(name, tensor, x.dtype)
    if not residual.is_contiguous():
        raise ValueError(f"residual must be contiguous, got strides {list(residual.stride())}")
    if (kernels := triton_kernels(x)) is not None:
        normal: torch.Tensor = kernels.add_rms_norm(x, residual, weight, eps)
        return normal
    return rms_norm(residual.add_(x), weight, eps)
