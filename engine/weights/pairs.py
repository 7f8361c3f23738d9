"""Read queries and keys whose rotated pairs are adjacent (Llama 4), with the two numbers of a pair half a head apart.

Scores do not change, since queries and keys are reordered in the same way.
"""

from dataclasses import dataclass

import torch

from baton.engine.config.model_config import ModelError
from baton.engine.weights.experts import StoredTensors

ROTATED = (".q_proj", ".k_proj")
_BY_OUTPUT = ("weight", "bias", "weight_scale", "weight_packed")  # kinds of tensors `[outputs, ...]`


@dataclass(frozen=True, slots=True)
class PairsApart:
    """Stored tensors, with reordered rows of query and key projections."""

    stored: StoredTensors
    head_dim: int

    def has(self, name: str) -> bool:
        return self.stored.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.stored.shape(name)

    def read(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> torch.Tensor:
        return self.stored.read(name, dtypes, *shape)

    def take(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> torch.Tensor:
        tensor = self.stored.take(name, dtypes, *shape)
        module, _, kind = name.rpartition(".")
        if not module.endswith(ROTATED) or tensor.numel() == 1:
            return tensor
        if kind not in _BY_OUTPUT or len(tensor) % self.head_dim:
            raise ModelError(f"tensor {name}: in this family, quantised queries and keys need scales per output")
        apart: torch.Tensor = tensor.unflatten(0, (-1, self.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        return apart


def pair_slices(rows: slice, head_dim: int) -> list[slice]:
    """Return the slices of stored rows that, one after another, are the same rows reordered as by PairsApart."""
    heads = range(rows.start, rows.stop, head_dim)
    return [slice(head + offset, head + head_dim, 2) for head in heads for offset in (0, 1)]
