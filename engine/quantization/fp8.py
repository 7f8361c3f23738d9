"""Weights as 8-bit floats (E4M3: 4 bits of exponent, 3 of mantissa) with a scale per output."""

from dataclasses import dataclass

import torch

from engine.lora.rows import AdapterRows
from engine.quantization.tiled import tiled_linear

LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448
# The exponents of E4M3 and float16 are biased by 7 and 15.
FLOAT16_RATIO = 256.0
WITHOUT_SECOND_SIGN = -16385  # 0xBFFF


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    weight: torch.Tensor  # float8_e4m3fn [out, in]
    scales: torch.Tensor  # float32 [out]
    bias: torch.Tensor | None  # [out]

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        """Numbers of 4 significant bits are exact in every dtype, so that the scale can wait for the product."""
        out = tiled_linear(x, len(self.weight), lambda tile: reduced(self.weight[tile], x.dtype), None)
        out = (out * (self.scales * FLOAT16_RATIO)).to(x.dtype)
        return out if self.bias is None else out + self.bias

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        return self.weight, self.scales


def quantise_fp8(weight: torch.Tensor, bias: torch.Tensor | None, columns: slice | None = None) -> Fp8Linear:
    """`weight` is float32 [out, in]; an element changes by at most 1/16 of itself, or 2**-10 of its row's scale.

    `columns`: the inputs that are kept, with the scales of whole rows; None: all.
    """
    scales = (weight.abs().amax(1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    kept = weight if columns is None else weight[:, columns]
    floats = (kept / scales[:, None]).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return Fp8Linear(floats, scales, bias)


def reduced(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """2**-8 of finite float8_e4m3fn, exactly, in a wider dtype: their bits, moved to where float16 has its own.

    Through integers and float32, because torch converts float8, and float16 to bfloat16, number by number on a CPU.
    """
    bits = weight.view(torch.int8).to(torch.int16)  # extends the sign: it is in bits 15 to 7
    halves = ((bits << 7) & WITHOUT_SECOND_SIGN).view(torch.float16)
    return halves.float().to(dtype)
