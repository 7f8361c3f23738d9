"""The rows that tokens begin as, however they are kept."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from kernels.gather_rows import gather_rows
from kernels.packed_weight import PackedWeight


class Embedding(Protocol):
    @property
    def device(self) -> torch.device: ...

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[tokens, hidden]`, a new tensor of floating point, of ids below the size of the vocabulary."""


@dataclass(frozen=True, slots=True)
class DenseEmbedding:
    weight: torch.Tensor  # [vocab, hidden]

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.weight)


@dataclass(frozen=True, slots=True)
class PackedEmbedding:
    """Rows of the head that it is tied to, so that they are in memory once."""

    weight: PackedWeight  # of plain numbers, see kernels/gather_rows.py

    @property
    def device(self) -> torch.device:
        return self.weight.data.device

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return gather_rows(token_ids, self.weight)
