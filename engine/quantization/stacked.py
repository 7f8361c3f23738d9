"""Projections of the same input that are stored differently, one after the other."""

from dataclasses import dataclass

import torch

from engine.lora.rows import AdapterRows
from engine.models.linear import Linear


@dataclass(frozen=True, slots=True)
class StackedLinear:
    parts: tuple[Linear, ...]

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)
