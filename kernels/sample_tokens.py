"""One token per row of logits: temperature, top-k, top-p, then one uniform number; and its log-probability."""

import torch

from kernels import reference
from kernels.check import check_dtype, check_shape
from kernels.native.library import native_library
from kernels.on_triton import triton_kernels
from kernels.sampled import Sampled


def sample_tokens(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> Sampled:
    """logits: float32 `[rows, vocab]`, -inf for tokens that are banned; a row without a token that is not, or with NaN
    or +inf, has NaN as its log-probability and no meaningful token. The others are `[rows]`:

    temperature: float32, 0 takes the likeliest token, the first of several; top_k: int64, 0 is no limit, tokens that
    tie with the last stay; top_p: float32 in [0, 1], keeps the likeliest tokens until they have that share of the mass,
    later ids first where they tie; uniform: float64 in [0, 1). The token is the one, by order of id, whose share of
    the mass holds the uniform number. No row depends on others. Implementations differ where the number lies within
    1e-5 of a boundary between tokens.
    """
    rows = len(logits)
    check_shape("logits", logits, rows, None)
    check_dtype("logits", logits, torch.float32)
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int64),
        ("top_p", top_p, torch.float32),
        ("uniform", uniform, torch.float64),
    ):
        check_shape(name, tensor, rows)
        check_dtype(name, tensor, dtype)
    if logits.stride(1) != 1:
        raise ValueError(f"rows of logits must be contiguous, got strides {list(logits.stride())}")
    if (kernels := triton_kernels(logits)) is not None:
        found: Sampled = kernels.sample_tokens(logits, temperature, top_k, top_p, uniform)
        return found
    native = native_library()
    if native is not None and samples_natively(logits):
        return native.sampling.sample_tokens(logits, temperature, top_k, top_p, uniform)
    return reference.sample_tokens(logits, temperature, top_k, top_p, uniform)


def samples_natively(logits: torch.Tensor) -> bool:
    """Whether a CPU's native kernel samples such logits; the reference goes row by row, in Python."""
    return native_library() is not None and logits.device.type == "cpu" and logits.stride(1) == 1
