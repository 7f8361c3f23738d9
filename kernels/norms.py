"""The small operations between products: norms, rotation, the gate of a feed-forward layer."""

import torch

from baton.kernels import reference
from baton.kernels.dispatch import pick
from baton.kernels.native.library import computes
from baton.kernels.types import check_dtype, check_shape


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension; a new tensor like `x`.

    x: `[..., size]`; weight: `[size]`, same dtype. The quotient is computed in float32 and cast to the dtype of `x`
    before the product with `weight`, which is what transformers does and what decides bits in bfloat16.
    """
    check_shape("weight", weight, x.shape[-1])
    check_dtype("weight", weight, x.dtype)
    return pick(reference.rms_norm, x, computes(x))(x, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds `x` to `residual` in place and returns `rms_norm(residual, weight, eps)`.

    x, residual: `[..., size]`, alike; residual contiguous. What is normalised is the sum, rounded to their dtype.
    """
    check_shape("residual", residual, *x.shape)
    check_shape("weight", weight, x.shape[-1])
    for name, tensor in (("residual", residual), ("weight", weight)):
        check_dtype(name, tensor, x.dtype)
    if not residual.is_contiguous():
        raise ValueError(f"residual must be contiguous, got strides {list(residual.stride())}")
    return pick(reference.add_rms_norm, x, computes(x))(x, residual, weight, eps)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates each pair `(x[i], x[i + head_dim / 2])` by its token's angle; a new tensor like `x`.

    x: `[tokens, heads, head_dim]`; cos, sin: `[tokens, head_dim / 2]`, same dtype as `x`.
    """
    tokens, _, head_dim = x.shape
    for name, tensor in (("cos", cos), ("sin", sin)):
        check_shape(name, tensor, tokens, head_dim // 2)
        check_dtype(name, tensor, x.dtype)
    return pick(reference.rotary, x)(x, cos, sin)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of a fused projection.

    gate_up: `[tokens, 2 * size]`, the gate first. Returns a new `[tokens, size]` of the same dtype.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must be [tokens, 2 * size], got {list(gate_up.shape)}")
    return pick(reference.silu_mul, gate_up, computes(gate_up))(gate_up)
