"""Quantised projections where the kernels of a GPU read them: few rows from the bytes themselves, many spelled out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.engine.models.batch import AdapterRows
from baton.engine.models.linear import Linear
from baton.engine.weights.quantised import Fp8Linear, Int4Linear, Int8Linear, StackedLinear, tiled_linear
from baton.engine.weights.sources import PackedTensors, QuantisingTensors
from baton.kernels.linear import dequantise_weight, quantised_linear
from baton.kernels.on_triton import triton_kernels
from baton.kernels.types import QuantisedWeight

KERNEL_ROWS = 64  # with more, products count and no longer bytes: a plain weight, made for the moment, is faster


def has_kernels(device: torch.device) -> bool:
    """Whether tensors of this device are computed on by kernels that read quantised weights."""
    return triton_kernels(torch.empty(0, device=device)) is not None


@dataclass(frozen=True, slots=True)
class KernelLinear:
    weight: QuantisedWeight
    column_order: torch.Tensor | None  # int64 [in]: which input each column takes; None where that is its own
    bias: torch.Tensor | None  # [out]

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        ordered = x if self.column_order is None else x[:, self.column_order]
        if len(x) <= KERNEL_ROWS:
            return quantised_linear(ordered, self.weight, self.bias)
        return tiled_linear(ordered, self.weight.outputs, lambda tile: self._spelled(tile, x.dtype), self.bias)

    def _spelled(self, tile: slice, dtype: torch.dtype) -> torch.Tensor:
        weight, zeros = self.weight, self.weight.zeros
        part = QuantisedWeight(weight.data[tile], weight.scales[tile], None if zeros is None else zeros[tile])
        return dequantise_weight(part, dtype)


def on_kernels(linear: Linear) -> Linear:
    """The same projection, read by a kernel, if it is of a kind that can be."""
    if isinstance(linear, Int8Linear | Fp8Linear):
        return KernelLinear(QuantisedWeight(linear.weight, linear.scales), None, linear.bias)
    if isinstance(linear, Int4Linear):
        weight = QuantisedWeight(linear.packed, linear.scales, linear.zeros)
        return KernelLinear(weight, linear.column_order, linear.bias)
    if isinstance(linear, StackedLinear):
        return StackedLinear(tuple(on_kernels(part) for part in linear.parts))
    return linear


class KernelTensors:
    """A `TensorSource` whose quantised projections are read by kernels."""

    def __init__(self, source: QuantisingTensors | PackedTensors) -> None:
        self._source = source

    def take(self, name: str, *shape: int) -> torch.Tensor:
        return self._source.take(name, *shape)

    def linear(self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool = False) -> Linear:
        return on_kernels(self._source.linear(names, sizes, inputs, bias))
