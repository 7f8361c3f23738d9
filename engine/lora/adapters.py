"""The adapters of one loaded model: which of its projections they may change, and the numbers that chunks name them by.

A projection adds, row by row, the output of the row's adapter; adapters of any rank share one batch. Projections are
wrapped while a model is built, so that this works for every architecture and every storage of weights alike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from baton.engine.config.model_config import ModelError
from baton.engine.lora.files import Adapter, LowRank
from baton.engine.models.batch import AdapterRows
from baton.engine.models.linear import Linear, MatmulBackend


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a module's matrix that this rank of several holds; all of it where there is one."""

    outputs: tuple[slice, ...]  # several where the module has projections stacked
    inputs: slice

    def rows(self, size: int) -> int:
        """Of a module's `size` rows, how many are here."""
        return sum(len(range(size)[each]) for each in self.outputs)


WHOLE = Part((slice(None),), slice(None))


@dataclass(frozen=True, slots=True)
class _Stack:
    """Replaced, never changed: a step that a GPU still computes keeps the one that it began with."""

    down: torch.Tensor  # [all ranks, in]
    up: torch.Tensor  # [all ranks, out]
    owners: torch.Tensor  # int64 [all ranks], the adapter's number
    ends: tuple[int, ...]  # of each adapter's ranks; that of number 0, which is none, is empty


class StackedFactors:
    """The factors of all adapters for one module, their ranks side by side, so that one product serves every row."""

    def __init__(
        self, columns: slice, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, part: Part = WHOLE
    ) -> None:
        """`columns`: those of the projection's output that belong to the module, as far as this rank has it. `shape`:
        of a full matrix in their place, `[out, in]`, of which this rank has that `part`.
        """
        self.columns = columns
        self.shape = shape
        self._part = part
        inputs = len(range(shape[1])[part.inputs])
        self._stack = _Stack(
            torch.empty(0, inputs, dtype=dtype, device=device),
            torch.empty(0, columns.stop - columns.start, dtype=dtype, device=device),
            torch.empty(0, dtype=torch.int64, device=device),
            (0,),
        )

    def appended(self, factors: LowRank | None) -> _Stack:
        """With the next adapter, for `replace`. None where it leaves this module alone. The scale is folded into the
        upper factor.
        """
        old, rank = self._stack, 0 if factors is None else factors.rank
        ends = (*old.ends, old.ends[-1] + rank)
        if factors is None:
            return _Stack(old.down, old.up, old.owners, ends)
        down = factors.down[:, self._part.inputs].to(old.down)
        own = torch.cat([factors.up[each] for each in self._part.outputs])
        up = (own.float() * factors.scale).T.to(old.up)
        owners = old.owners.new_full((rank,), len(ends) - 1)
        return _Stack(torch.cat((old.down, down)), torch.cat((old.up, up)), torch.cat((old.owners, owners)), ends)

    def without(self, number: int) -> _Stack:
        """For `replace`: the adapter has no ranks any more, its number stays."""
        old = self._stack
        begin, end = old.ends[number - 1], old.ends[number]
        if begin == end:
            return old
        down, up, owners = (torch.cat((each[:begin], each[end:])) for each in (old.down, old.up, old.owners))
        return _Stack(down, up, owners, (*old.ends[:number], *(each - (end - begin) for each in old.ends[number:])))

    def replace(self, stack: _Stack) -> None:
        self._stack = stack

    def add_to(self, y: torch.Tensor, x: torch.Tensor, adapters: AdapterRows) -> None:
        """Adds to `y` `[rows, out]`, in place, for the rows `x` `[rows, in]` that have adapters.

        Between the lowest and the highest adapter of the batch, all ranks are computed for all rows, and those of
        other adapters are zeroed: a row's result does not depend on which others it shares the batch with.
        """
        stack = self._stack
        ranks = slice(stack.ends[adapters.lowest - 1], stack.ends[adapters.highest])
        if ranks.start == ranks.stop:
            return
        inner = x @ stack.down[ranks].T
        if adapters.lowest != adapters.highest:
            inner.masked_fill_(adapters.adapters[:, None] != stack.owners[ranks], 0.0)
        y.addmm_(inner, stack.up[ranks])


class AdaptedLinear:
    """A projection, perhaps of several modules stacked, and the adapters of each. Costs nothing to rows without one."""

    def __init__(
        self,
        base: Linear,
        sizes: Sequence[int],
        inputs: int,
        dtype: torch.dtype,
        device: torch.device,
        parts: Sequence[Part] | None = None,
    ):
        """`sizes` and `inputs` are those of the whole model; `parts`: of each module, what this rank has of it."""
        self.base = base
        parts = parts or [WHOLE] * len(sizes)
        own = [part.rows(size) for size, part in zip(sizes, parts, strict=True)]
        begins = [sum(own[:index]) for index in range(len(own))]
        self.modules = tuple(
            StackedFactors(slice(begin, begin + columns), (size, inputs), dtype, device, part)
            for begin, columns, size, part in zip(begins, own, sizes, parts, strict=True)
        )

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        y = self.base(x)
        if adapters is not None:
            for module in self.modules:
                module.add_to(y[adapters.rows, module.columns], x[adapters.rows], adapters)
        return y


def without_adapters(linear: Linear) -> Linear:
    return linear.base if isinstance(linear, AdaptedLinear) else linear


class AdapterSet:
    """Adapters, numbered from 1 in the order in which they were added. One thread at a time, as its model."""

    def __init__(self) -> None:
        self._modules: dict[str, StackedFactors] = {}
        self._adopted: Callable[[], Mapping[str, StackedFactors]] | None = None
        self._count = 0

    def adopt(self, modules: Callable[[], Mapping[str, StackedFactors]]) -> None:
        """Modules of the model, by name, of which someone else sees to it that their factors are added; they are asked
        for with the first adapter.
        """
        self._adopted = modules

    def adapted(
        self,
        base: Linear,
        names: Sequence[str],
        sizes: Sequence[int],
        inputs: int,
        backend: MatmulBackend,
        parts: Sequence[Part] | None = None,
    ) -> Linear:
        """A projection of these modules, stacked, that adapters may change, if it is one that they can.

        `parts`: as in AdaptedLinear.
        """
        if not all(map(is_adaptable, names)):
            return base
        adapted = AdaptedLinear(base, sizes, inputs, backend.dtype, backend.device, parts)
        self._modules.update(zip(names, adapted.modules, strict=True))
        return adapted

    def add(self, name: str, adapter: Adapter) -> int:
        """Returns its number; `name` is for messages. Not while a step runs.

        Raises: ModelError for an adapter that is not for this model, or has no room; then nothing has changed.
        """
        if self._adopted is not None:
            self._modules.update(self._adopted())
            self._adopted = None
        self._check(name, adapter)
        try:
            grown = [stacked.appended(adapter.factors.get(module)) for module, stacked in self._modules.items()]
        except (RuntimeError, MemoryError) as error:  # of torch's allocators: on a CPU nothing narrower
            raise ModelError(f"adapter {name!r} does not fit into the memory of the device") from error
        for stacked, stack in zip(self._modules.values(), grown, strict=True):
            stacked.replace(stack)
        self._count += 1
        return self._count

    def skip(self) -> int:
        """Takes the next number for an adapter that changes nothing: another rank has one there."""
        return self.add("none", Adapter({}))

    def remove(self, number: int) -> None:
        """Frees its memory; the number is not given again. Not while a step runs, nor with a request that uses it."""
        for stacked in self._modules.values():
            stacked.replace(stacked.without(number))

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
    return module.endswith(("_proj", "_proj_with_mqa")) and "expert" not in module
