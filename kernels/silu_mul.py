"""The gate of a SwiGLU feed-forward layer (arXiv:2002.05202)."""

import torch

from kernels import reference
from kernels.native.library import native_library
from kernels.on_triton import triton_kernels


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of a fused projection.

    gate_up: `[tokens, 2 * size]`, the gate first. Returns a new `[tokens, size]` of the same dtype.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must be [tokens, 2 * size], got {list(gate_up.shape)}")
    if (kernels := triton_kernels(gate_up)) is not None:
        gated: torch.Tensor = kernels.silu_mul(gate_up)
        return gated
    native = native_library()
    if native is not None and native.layers.takes(gate_up):
        return native.layers.silu_mul(gate_up)
    return reference.silu_mul(gate_up)
