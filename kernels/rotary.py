"""Rotary position embedding (RoFormer, arXiv:2104.09864), in the half-split order of Hugging Face checkpoints."""

import torch

from kernels import reference
from kernels.check import check_dtype, check_shape


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates each pair `(x[i], x[i + head_dim / 2])` by its token's angle; a new tensor like `x`.

    x: `[tokens, heads, head_dim]`; cos, sin: `[tokens, head_dim / 2]`, same dtype as `x`.
    """
    tokens, _, head_dim = x.shape
    for name, tensor in (("cos", cos), ("sin", sin)):
        check_shape(name, tensor, tokens, head_dim // 2)
        check_dtype(name, tensor, x.dtype)
    return reference.rotary(x, cos, sin)
