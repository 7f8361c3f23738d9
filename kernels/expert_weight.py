"""The same projection of all experts of a mixture, and which rows go through which."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.check import check_shape
from kernels.quantised_weight import QuantisedWeight


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """`rows`: `[experts * outputs, inputs]`, expert after expert; plain numbers of any float, or quantised."""

    rows: torch.Tensor | QuantisedWeight
    experts: int

    def __post_init__(self) -> None:
        if isinstance(self.rows, torch.Tensor):
            check_shape("rows", self.rows, None, None)
        if self.experts < 1 or self._all_outputs % self.experts:
            raise ValueError(f"{self._all_outputs} rows are not as many for each of {self.experts} experts")

    @property
    def outputs(self) -> int:
        """Of one expert."""
        return self._all_outputs // self.experts

    @property
    def inputs(self) -> int:
        return self.rows.shape[1] if isinstance(self.rows, torch.Tensor) else self.rows.inputs

    @property
    def _all_outputs(self) -> int:
        return len(self.rows) if isinstance(self.rows, torch.Tensor) else self.rows.outputs


class SortedPairs(NamedTuple):
    """Pairs of a row and an expert that takes it, sorted by expert: pair p is of row `p // (pairs / rows)`.

    Their number follows from shapes, and which expert has how many is never looked at on the host.
    """

    order: torch.Tensor  # int64 [pairs]: the pairs, those of the first expert first
    starts: torch.Tensor  # int64 [experts + 1]: where in `order` each expert's begin, and the end


def sorted_pairs(chosen: torch.Tensor, experts: int) -> SortedPairs:
    """`chosen`: int64 `[rows, experts per row]`. Waits for nothing, and all shapes follow from its own."""
    ordered, order = chosen.flatten().sort(stable=True)
    return SortedPairs(order, torch.searchsorted(ordered, torch.arange(experts + 1, device=chosen.device)))
