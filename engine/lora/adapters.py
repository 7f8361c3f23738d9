"""The adapters of one loaded model: which of its projections they may change, and the numbers that chunks name them by.

A projection adds, row by row, the output of the row's adapter; adapters of any rank share one batch. Projections are
wrapped while a model is built, so that this works for every architecture and every storage of weights alike.
"""

from collections.abc import Mapping, Sequence

import torch

from baton.engine.config.model_config import ModelError
from baton.engine.lora.files import Adapter, LowRank
from baton.engine.models.batch import AdapterRows
from baton.engine.models.linear import Linear, MatmulBackend


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


class AdapterSet:
    """Adapters, numbered from 1 in the order in which they were added. One thread at a time, as its model."""

    def __init__(self) -> None:
        self._modules: dict[str, StackedFactors] = {}
        self._count = 0

    def adopt(self, modules: Mapping[str, StackedFactors]) -> None:
        """Modules of the model, by name, of which someone else sees to it that their factors are added."""
        self._modules.update(modules)

    def adapted(
        self, base: Linear, names: Sequence[str], sizes: Sequence[int], inputs: int, backend: MatmulBackend
    ) -> Linear:
        """A projection of these modules, stacked, that adapters may change, if it is one that they can."""
        if not all(map(is_adaptable, names)):
            return base
        adapted = AdaptedLinear(base, sizes, inputs, backend.dtype, backend.device)
        self._modules.update(zip(names, adapted.modules, strict=True))
        return adapted

    def add(self, name: str, adapter: Adapter) -> int:
        """Returns its number; `name` is for messages. Not while a step runs.

        Raises: ModelError for an adapter that is not for this model; then nothing has changed.
        """
        self._check(name, adapter)
        for module, stacked in self._modules.items():
            stacked.append(adapter.factors.get(module))
        self._count += 1
        return self._count

    def _check(self, name: str, adapter: Adapter) -> None:
        for module, factors in adapter.factors.items():
            stacked = self._modules.get(module)
            if stacked is None:
                raise ModelError(f"adapter {name!r} changes {module}, which this model has not or cannot adapt")
            shape = (len(factors.up), factors.down.shape[1])
            if shape != stacked.shape:
                raise ModelError(f"adapter {name!r} is for a {module} of {list(shape)}, not {list(stacked.shape)}")


def is_adaptable(module: str) -> bool:
    """Whether the decoder hands a projection its rows in order: not the head, which sees last rows, nor experts."""
    return module.endswith("_proj") and "expert" not in module
