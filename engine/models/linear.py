"""Projections of a model: the decoder's interface to them, however the weights are stored."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.lora.rows import AdapterRows


class Linear(Protocol):
    """`[tokens, in]` to `[tokens, out]`, in the dtype of `x`.

    `adapters` names the rows that have an adapter; only the wrapper of engine/lora/linear.py acts on it.
    """

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class DenseLinear:
    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None = None  # [out]

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class LinearSource(Protocol):
    """Where a model's projections come from."""

    def linear(self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool = False) -> Linear:
        """Projections of the same input stacked into one: `names[i]` (a module, without `.weight`) has `sizes[i]` rows.

        Raises ModelError if a tensor is absent or misshapen.
        """
