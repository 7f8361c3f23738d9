"""Weights laid out once for kernels/packed_linear.py.

bfloat16 weights take half the memory of float32 and lose nothing where they were bfloat16 already. int8 weights have a
scale per output; each row of inputs is rounded to 8 bits too, with a scale of its own (W8A8, as in arXiv:2211.10438).
"""

import enum
from dataclasses import dataclass

import torch

from kernels.check import check_dtype, check_shape

PANEL = 32  # outputs side by side


class Stored(enum.IntEnum):
    """How numbers are kept, and what inputs are rounded to before the products. Sums are float32; of integers exact."""

    FLOAT32 = 0
    BFLOAT16 = 1  # inputs stay as they are
    ROUNDING = 2  # bfloat16, and inputs are rounded to it
    INT8 = 3  # and inputs to integers of -127 to 127 times a scale per row


SIDE_BY_SIDE = {Stored.FLOAT32: 1, Stored.BFLOAT16: 2, Stored.ROUNDING: 2, Stored.INT8: 4}
DTYPES = {
    Stored.FLOAT32: torch.float32,
    Stored.BFLOAT16: torch.bfloat16,
    Stored.ROUNDING: torch.bfloat16,
    Stored.INT8: torch.int8,
}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """`data`: `[panels, ceil(inputs / n), 32, n]`, n numbers of an output side by side; zeros after the last."""

    data: torch.Tensor
    stored: Stored
    outputs: int
    inputs: int
    bias: torch.Tensor | None  # float32 [outputs]
    scales: torch.Tensor | None = None  # of INT8: float32 [32 * panels]
    sums: torch.Tensor | None = None  # of INT8: int32 [32 * panels], of each output's integers


def pack(weight: torch.Tensor, stored: Stored, bias: torch.Tensor | None) -> PackedWeight:
    """`weight`: `[outputs, inputs]`, converted to what `stored` says, which is not INT8; bias: `[outputs]`."""
    data = _panels(weight.to(DTYPES[stored]), SIDE_BY_SIDE[stored])
    outputs, inputs = weight.shape
    return PackedWeight(data, stored, outputs, inputs, None if bias is None else bias.float())


def pack_int8(weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
    """weight: int8 `[outputs, inputs]`, which stands for `weight * scales[:, None]`; bias: `[outputs]`."""
    check_dtype("weight", weight, torch.int8)
    check_shape("scales", scales, len(weight))
    outputs, inputs = weight.shape
    padding = (0, -outputs % PANEL)
    return PackedWeight(
        _panels(weight, SIDE_BY_SIDE[Stored.INT8]),
        Stored.INT8,
        outputs,
        inputs,
        None if bias is None else bias.float(),
        torch.nn.functional.pad(scales.float(), padding),
        torch.nn.functional.pad(weight.sum(1, dtype=torch.int32), padding),
    )


def unpacked(weight: PackedWeight) -> torch.Tensor:
    """`[outputs, inputs]` in the dtype that it is stored in."""
    panels = weight.data.transpose(1, 2)  # [panels, 32, groups, n]
    return panels.reshape(len(panels) * PANEL, -1)[: weight.outputs, : weight.inputs]


def _panels(weight: torch.Tensor, side_by_side: int) -> torch.Tensor:
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -inputs % side_by_side, 0, -outputs % PANEL))
    return padded.view(-1, PANEL, padded.shape[1] // side_by_side, side_by_side).transpose(1, 2).contiguous()
