"""A projection whose weight stays as a GGUF file stores it and is spelled out a few rows at a time."""

from dataclasses import dataclass

import torch

from engine.lora.rows import AdapterRows
from engine.quantization.gguf_blocks import dequantise
from engine.quantization.gguf_file import TensorType
from engine.quantization.tiled import tiled_linear


@dataclass(frozen=True, slots=True)
class GgufLinear:
    weight: torch.Tensor  # uint8 [out, bytes of a row]
    type: TensorType
    bias: torch.Tensor | None  # [out]

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        return tiled_linear(
            x, len(self.weight), lambda tile: dequantise(self.weight[tile], self.type).to(x.dtype), self.bias
        )

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        return (self.weight,)
