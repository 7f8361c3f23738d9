"""Rows of a packed weight as they were before: what looks tokens up in an embedding that is the head too."""

import torch

from kernels import reference
from kernels.check import check_index
from kernels.native.library import native_library
from kernels.packed_weight import PackedWeight, Stored

GATHERED = (Stored.FLOAT32, Stored.BFLOAT16, Stored.ROUNDING)  # others are no longer the numbers that were packed


def gather_rows(token_ids: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """token_ids: int64 `[tokens]`, outputs of `weight`, in any order, also several times.

    Returns float32 `[tokens, inputs]`, contiguous, of its own memory: the numbers that were packed, bit by bit. Raises:
    ValueError for a weight of integers, IndexError for an id that is no output.
    """
    check_index("token_ids", token_ids)
    if weight.stored not in GATHERED:
        raise ValueError(f"rows of a weight stored as {weight.stored.name} are not gathered")
    native = native_library()
    if native is not None and token_ids.device.type == "cpu":
        return native.layers.gather_rows(token_ids, weight)
    return reference.gather_rows(token_ids, weight)
