"""Weights of 8 or 4 bits as GPUs read them: rows of outputs, as engine/quantization stores them."""

from dataclasses import dataclass

import torch

from kernels.check import check_dtype, check_shape


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """`[outputs, inputs]` numbers; data says by its dtype which.

    int8 and float8_e4m3fn `[outputs, inputs]`: number = stored * scales[output]. uint8 `[outputs, inputs / 2]` holds
    codes of 4 bits, column c in the low half of byte c and column c + inputs / 2 in its high half:
    number = (code - zeros[output, group]) * scales[output, group], groups being equal runs of columns.
    """

    data: torch.Tensor
    scales: torch.Tensor  # float32 [outputs]; of codes: any float [outputs, groups]
    zeros: torch.Tensor | None = None  # of codes: uint8 [outputs, groups]

    def __post_init__(self) -> None:
        outputs = len(self.data)
        if self.data.dtype == torch.uint8:
            if self.zeros is None:
                raise ValueError("codes of 4 bits need zeros")
            check_shape("scales", self.scales, outputs, None)
            check_shape("zeros", self.zeros, *self.scales.shape)
            check_dtype("zeros", self.zeros, torch.uint8)
        elif self.data.dtype in (torch.int8, torch.float8_e4m3fn):
            check_shape("scales", self.scales, outputs)
            check_dtype("scales", self.scales, torch.float32)
        else:
            raise ValueError(f"a weight in {self.data.dtype} is not read")

    @property
    def outputs(self) -> int:
        return len(self.data)

    @property
    def inputs(self) -> int:
        return self.data.shape[1] * (2 if self.has_codes else 1)

    @property
    def has_codes(self) -> bool:
        return self.data.dtype == torch.uint8
