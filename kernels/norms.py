"""Small operations between matrix products: norms, rotary embedding, and the gate of a feed-forward layer."""

import torch

from baton.kernels import reference
from baton.kernels.dispatch import pick
from baton.kernels.native.library import computes
from baton.kernels.types import Gate, check_angles, check_dtype, check_norm, check_shape


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute `x / sqrt(mean(x^2) + eps) * weight` over the last dimension; returns a new tensor like `x`.

    x: `[..., size]`; weight: `[size]`, in the dtype of `x` or float32. The quotient is computed in float32 and rounded
    to the dtype of `weight` before the multiplication, as in Hugging Face transformers. This matters for bfloat16.
    """
    check_norm("weight", weight, x)
    return pick(reference.rms_norm, x, computes(x))(x, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `x` to `residual` in place and return `rms_norm(residual, weight, eps)`.

    x, residual: `[..., size]`, same dtype; residual contiguous. The sum is rounded to their dtype before the norm.
    """
    check_shape("residual", residual, *x.shape)
    check_norm("weight", weight, x)
    check_dtype("residual", residual, x.dtype)
    if not residual.is_contiguous():
        raise ValueError(f"residual must be contiguous, got strides {list(residual.stride())}")
    return pick(reference.add_rms_norm, x, computes(x))(x, residual, weight, eps)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair `(x[i], x[i + angles])` by its token's angle; returns a new tensor like `x`.

    x: `[tokens, heads, head_dim]`; cos, sin: `[tokens, angles]`, same dtype as `x`, at most `head_dim / 2` angles.
    Numbers from index `2 * angles` on are unchanged.
    """
    check_angles(cos, sin, len(x), x)
    return pick(reference.rotary, x)(x, cos, sin)


def gate_mul(gate_up: torch.Tensor, gate: Gate = Gate.SILU) -> torch.Tensor:
    """Compute `gate(first half) * second half` of the output of a fused projection.

    gate_up: `[tokens, 2 * size]`, gates in the first half. Returns a new `[tokens, size]` of the same dtype.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must be [tokens, 2 * size], got {list(gate_up.shape)}")
    return pick(reference.gate_mul, gate_up, computes(gate_up))(gate_up, gate)
