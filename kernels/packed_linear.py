"""Rows times a packed weight: what all projections of a decoder are on a CPU."""

import torch

from kernels import reference
from kernels.check import check_dtype, check_shape
from kernels.native.library import native_library
from kernels.packed_weight import PackedWeight


def packed_linear(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """x: float32 `[rows, inputs]`; a new float32 `[rows, outputs]`. No row's result depends on its neighbours.

    A row with anything in it that is not finite has no finite result.
    """
    check_shape("x", x, None, weight.inputs)
    check_dtype("x", x, torch.float32)
    native = native_library()
    if native is not None and x.device.type == "cpu":
        return native.layers.linear(x, weight)
    return reference.packed_linear(x, weight)
