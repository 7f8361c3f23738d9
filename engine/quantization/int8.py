"""Weights of 8 bits: per output a scale and integers from -127 to 127, symmetric. Activations keep their dtype."""

from dataclasses import dataclass

import torch

from engine.lora.rows import AdapterRows
from engine.quantization.tiled import tiled_linear

LARGEST = 127
# Rows up to which torch's CPU kernel, which reads the integers themselves, is faster than spelling out tiles.
KERNEL_ROWS = 16


@dataclass(frozen=True, slots=True)
class Int8Linear:
    weight: torch.Tensor  # int8 [out, in]
    scales: torch.Tensor  # [out], float32, or x's dtype where the kernel is used: it wants no other
    bias: torch.Tensor | None  # [out]
    is_part: bool = False  # of the inputs, by which `scales` are not decided alone; another rank has the others

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        if x.dtype == torch.bfloat16 and x.device.type == "cpu" and len(x) <= KERNEL_ROWS:
            out = torch._weight_int8pack_mm(x.contiguous(), self.weight, self.scales.to(x.dtype))
        else:
            # Integers up to 127 are exact in every dtype, so that the scale can wait for the product.
            out = tiled_linear(x, len(self.weight), lambda tile: self.weight[tile].to(x.dtype), None)
            out = (out * self.scales).to(x.dtype)
        return out if self.bias is None else out + self.bias

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        return self.weight, self.scales


def quantise_int8(weight: torch.Tensor, bias: torch.Tensor | None, columns: slice | None = None) -> Int8Linear:
    """`weight` is float32 [out, in]; an element changes by at most half the scale of its row.

    `columns`: the inputs that are kept, with the scales of whole rows; None: all.
    """
    scales = (weight.abs().amax(1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    kept = weight if columns is None else weight[:, columns]
    integers = (kept / scales[:, None]).round_().clamp_(-LARGEST, LARGEST)
    return Int8Linear(integers.to(torch.int8), scales, bias, is_part=columns is not None)
