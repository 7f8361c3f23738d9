"""A projection that adds, row by row, the output of the row's adapter. Adapters of any rank share one batch."""

from collections.abc import Sequence

import torch

from baton.engine.lora.files import LowRank
from baton.engine.models.batch import AdapterRows
from baton.engine.models.linear import Linear


class StackedFactors:
    """The factors of all adapters for one module, their ranks side by side, so that one product serves every row."""

    def __init__(self, columns: slice, inputs: int, dtype: torch.dtype, device: torch.device) -> None:
        """`columns` are those of the projection's output that belong to the module."""
        self.columns = columns
        self._down = torch.empty(0, inputs, dtype=dtype, device=device)  # [all ranks, in]
        self._up = torch.empty(0, columns.stop - columns.start, dtype=dtype, device=device)  # [all ranks, out]
        self._owners = torch.empty(0, dtype=torch.int64, device=device)  # [all ranks], the adapter's number
        self._ends = [0]  # of each adapter's ranks; that of number 0, which is none, is empty

    @property
    def shape(self) -> tuple[int, int]:
        """Of a full matrix in their place: [out, in]."""
        return self._up.shape[1], self._down.shape[1]

    def append(self, factors: LowRank | None) -> None:
        """Adds the next adapter; None where it leaves this module alone. The scale is folded into the upper factor."""
        rank = 0 if factors is None else factors.rank
        self._ends.append(self._ends[-1] + rank)
        if factors is None:
            return
        up = (factors.up.float() * factors.scale).T
        self._down = torch.cat((self._down, factors.down.to(self._down)))
        self._up = torch.cat((self._up, up.to(self._up)))
        self._owners = torch.cat((self._owners, self._owners.new_full((rank,), len(self._ends) - 1)))

    def add_to(self, y: torch.Tensor, x: torch.Tensor, adapters: AdapterRows) -> None:
        """Adds to `y` `[rows, out]`, in place, for the rows `x` `[rows, in]` that have adapters.

        Between the lowest and the highest adapter of the batch, all ranks are computed for all rows, and those of
        other adapters are zeroed: a row's result does not depend on which others it shares the batch with.
        """
        ranks = slice(self._ends[adapters.lowest - 1], self._ends[adapters.highest])
        if ranks.start == ranks.stop:
            return
        inner = x @ self._down[ranks].T
        if adapters.lowest != adapters.highest:
            inner.masked_fill_(adapters.adapters[:, None] != self._owners[ranks], 0.0)
        y.addmm_(inner, self._up[ranks])


class AdaptedLinear:
    """A projection, perhaps of several modules stacked, and the adapters of each. Costs nothing to rows without one."""

    def __init__(self, base: Linear, sizes: Sequence[int], inputs: int, dtype: torch.dtype, device: torch.device):
        self.base = base
        begins = [sum(sizes[:index]) for index in range(len(sizes))]
        self.modules = tuple(
            StackedFactors(slice(begin, begin + size), inputs, dtype, device)
            for begin, size in zip(begins, sizes, strict=True)
        )

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        y = self.base(x)
        if adapters is not None:
            for module in self.modules:
                module.add_to(y[adapters.rows, module.columns], x[adapters.rows], adapters)
        return y
