"""Copies of some rows of logits, without the tokens that may not come."""

from collections.abc import Sequence

import torch

from kernels import reference
from kernels.check import check_dtype, check_shape
from kernels.native.library import native_library


def take_rows(logits: torch.Tensor, places: Sequence[int], allowed: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """logits: float32 `[rows, vocab]`. Returns float32 `[len(places), vocab]`, contiguous, of its own memory.

    places: rows of logits, in any order, also several times. allowed: for each of them None, where all tokens are, or
    uint8 `[any]` on the CPU, contiguous, one bit per token, the least significant first; the others become -inf, and so
    do tokens beyond the last bit.
    """
    check_shape("logits", logits, None, None)
    check_dtype("logits", logits, torch.float32)
    if places and not 0 <= min(places) <= max(places) < len(logits):
        raise ValueError(f"the rows {list(places)} of {len(logits)}")
    check_masks(allowed, len(places))
    native = native_library()
    if native is None or logits.device.type != "cpu" or logits.stride(1) != 1:
        return reference.take_rows(logits, places, allowed)
    return native.sampling.take_rows(logits, places, allowed)


def check_masks(allowed: Sequence[torch.Tensor | None], rows: int) -> None:
    if len(allowed) != rows:
        raise ValueError(f"{len(allowed)} masks for {rows} rows")
    if any(bits is not None and (bits.dtype is not torch.uint8 or bits.dim() != 1) for bits in allowed):
        raise ValueError(f"masks must be {torch.uint8} [any]")
