"""LoRA adapters of one loaded model: the projections that they may change, and the numbers by which chunks name them.

A projection adds the output of each row's adapter; adapters of any rank share one batch. Projections are wrapped while
a model is built, so this works for every architecture and weight format.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from baton.engine.config.model_config import ModelError
from baton.engine.lora.files import LoraWeights, LowRank
from baton.engine.models.batch import AdapterRows
from baton.engine.models.linear import Linear, MatmulBackend
from baton.engine.weights.names import text_name


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of a module's matrix; the complete matrix on a single rank."""

    outputs: tuple[slice, ...]  # rows of the matrix, one slice per stacked projection
    inputs: slice

    def rows(self, size: int) -> int:
        """Return how many of a module's `size` rows this rank has."""
        return sum(len(range(size)[each]) for each in self.outputs)


WHOLE = Part((slice(None),), slice(None))


@dataclass(frozen=True, slots=True)
class _Stack:
    """Immutable factors of a module: a step still running on a GPU keeps the version that it started with."""

    down: torch.Tensor  # [sum of the adapters' LoRA ranks, in]
    up: torch.Tensor  # [sum of the adapters' LoRA ranks, out]
    owners: torch.Tensor  # int64, number of the adapter of each row of `down` and `up`
    ends: tuple[int, ...]  # end of each adapter's rows, by its number; `ends[0]` is 0


class StackedFactors:
    """LoRA factors of all adapters for one module, concatenated: one matrix product serves all rows of a batch."""

    def __init__(
        self, columns: slice, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, part: Part = WHOLE
    ) -> None:
        """Start without adapters. `columns`: columns of the projection's output that belong to the module. `shape`:
        `[out, in]` of the unsharded matrix, of which this rank has `part`.
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
        """Return the factors of all adapters and of a new one, whose scale is folded into its `up`.

        `factors`: None if the adapter does not change this module.
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
        """Return the factors without those of an adapter, for `replace`. The adapter's number is not used again."""
        old = self._stack
        begin, end = old.ends[number - 1], old.ends[number]
        if begin == end:
            return old
        down, up, owners = (torch.cat((each[:begin], each[end:])) for each in (old.down, old.up, old.owners))
        return _Stack(down, up, owners, (*old.ends[:number], *(each - (end - begin) for each in old.ends[number:])))

    def replace(self, stack: _Stack) -> None:
        self._stack = stack

    def add_to(self, y: torch.Tensor, x: torch.Tensor, adapters: AdapterRows) -> None:
        """Add the adapters' output to `y` `[rows, out]` in place, for rows `x` `[rows, in]` with adapters.

        Each row is multiplied by the factors of all adapters from the batch's lowest to its highest number, and the
        products with adapters of other rows are zeroed: a row's result does not depend on the other rows of the batch.
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
    """Projection of one or several stacked modules, with the adapters of each. Rows without an adapter cost nothing."""

    def __init__(
        self,
        base: Linear,
        sizes: Sequence[int],
        inputs: int,
        dtype: torch.dtype,
        device: torch.device,
        parts: Sequence[Part] | None = None,
    ):
        """Wrap a projection. `sizes`: unsharded outputs of each module. `parts`: this rank's part of each module."""
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
    """Adapters of a model, numbered from 1 in the order of their addition. Not thread-safe, like the model."""

    def __init__(self) -> None:
        self._modules: dict[str, StackedFactors] = {}
        self._adopted: Callable[[], Mapping[str, StackedFactors]] | None = None
        self._count = 0

    def adopt(self, modules: Callable[[], Mapping[str, StackedFactors]]) -> None:
        """Include modules that apply factors themselves. `modules`: returns their factors; the first `add` calls it."""
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
        """Wrap a projection of stacked modules if adapters may change it. `parts`: see AdaptedLinear."""
        if not all(map(is_adaptable, names)):
            return base
        adapted = AdaptedLinear(base, sizes, inputs, backend.dtype, backend.device, parts)
        self._modules.update(zip(names, adapted.modules, strict=True))
        return adapted

    def add(self, name: str, adapter: LoraWeights) -> int:
        """Add an adapter and return its number; `name` is for messages. Must not be called during a step.

        Raises: ModelError, without effect, for an adapter of another model or if memory is short.
        """
        if self._adopted is not None:
            self._modules.update(self._adopted())
            self._adopted = None
        adapter = LoraWeights({self._own_name(module): factors for module, factors in adapter.factors.items()})
        self._check(name, adapter)
        try:
            grown = [stacked.appended(adapter.factors.get(module)) for module, stacked in self._modules.items()]
        except (RuntimeError, MemoryError) as error:  # torch's allocators raise nothing narrower on a CPU
            raise ModelError(
                f"adapter {name!r} does not fit into the memory of the device; remove another adapter first"
            ) from error
        for stacked, stack in zip(self._modules.values(), grown, strict=True):
            stacked.replace(stack)
        self._count += 1
        return self._count

    def skip(self) -> int:
        """Reserve and return the next number, for weights or for an adapter that failed on this rank."""
        return self.add("none", LoraWeights({}))

    def remove(self, number: int) -> None:
        """Free an adapter's memory; its number is not reused. No step may run and no request may use the adapter."""
        for stacked in self._modules.values():
            stacked.replace(stacked.without(number))

    def _own_name(self, module: str) -> str:
        """Return this model's name of an adapter's module: the adapter may be of a model that also takes images."""
        return module if module in self._modules else text_name(module) or module

    def _check(self, name: str, adapter: LoraWeights) -> None:
        for module, factors in adapter.factors.items():
            stacked = self._modules.get(module)
            if stacked is None:
                raise ModelError(f"adapter {name!r} changes {module}, which this model lacks or cannot adapt")
            shape = (len(factors.up), factors.down.shape[1])
            if shape != stacked.shape:
                raise ModelError(
                    f"adapter {name!r} is for a {module} of {list(shape)}; this model's is {list(stacked.shape)}"
                )


def is_adaptable(module: str) -> bool:
    """Return whether a projection of a layer can be adapted. Experts cannot: they do not receive all rows in order."""
    return "expert" not in module
