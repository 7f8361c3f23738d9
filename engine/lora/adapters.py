"""The adapters of one loaded model: which of its projections they may change, and the numbers that chunks name them by.

A model is made adaptable while it is built: its projections are wrapped where they come from, so that this works for
every architecture and every storage of weights alike.
"""

from collections.abc import Mapping, Sequence

import torch

from baton.engine.config.model_config import ModelError
from baton.engine.lora.files import Adapter
from baton.engine.lora.linear import AdaptedLinear, StackedFactors
from baton.engine.models.checkpoint import TensorSource
from baton.engine.models.linear import Linear


class AdapterSet:
    """Adapters, numbered from 1 in the order in which they were added. One thread at a time, as its model."""

    def __init__(self) -> None:
        self._modules: dict[str, StackedFactors] = {}
        self._count = 0

    def adopt(self, modules: Mapping[str, StackedFactors]) -> None:
        """Modules of the model, by name, of which someone else sees to it that their factors are added."""
        self._modules.update(modules)

    def adaptable(self, source: TensorSource, dtype: torch.dtype, device: torch.device) -> "AdaptableTensors":
        """`source` for a model whose projections these adapters may change; it computes in `dtype` on `device`."""
        return AdaptableTensors(source, self._modules, dtype, device)

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


class AdaptableTensors:
    """A `TensorSource` that wraps the projections of decoder layers and notes them by the names of their modules."""

    def __init__(
        self, source: TensorSource, modules: dict[str, StackedFactors], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._source = source
        self._modules = modules
        self._dtype = dtype
        self._device = device

    def take(self, name: str, *shape: int) -> torch.Tensor:
        return self._source.take(name, *shape)

    def linear(self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool = False) -> Linear:
        base = self._source.linear(names, sizes, inputs, bias)
        if not all(is_adaptable(name) for name in names):
            return base
        adapted = AdaptedLinear(base, sizes, inputs, self._dtype, self._device)
        self._modules.update(zip(names, adapted.modules, strict=True))
        return adapted


def is_adaptable(module: str) -> bool:
    """Whether the decoder hands a projection its rows in order: not the head, which sees last rows, nor experts."""
    return module.endswith("_proj") and "expert" not in module
