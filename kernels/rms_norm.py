"""Root mean square normalisation (arXiv:1910.07467)."""

import torch

from kernels import reference
from kernels.check import check_dtype, check_shape
from kernels.native.library import native_library
from kernels.on_triton import triton_kernels


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension; a new tensor like `x`.

    x: `[..., size]`; weight: `[size]`, same dtype. The quotient is computed in float32 and cast to the dtype of `x`
    before the product with `weight`, which is what transformers does and what decides bits in bfloat16.
    """
    check_shape("weight", weight, x.shape[-1])
    check_dtype("weight", weight, x.dtype)
    if (kernels := triton_kernels(x)) is not None:
        normal: torch.Tensor = kernels.rms_norm(x, weight, eps)
        return normal
    native = native_library()
    if native is not None and native.layers.takes(x):
        return native.layers.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)
