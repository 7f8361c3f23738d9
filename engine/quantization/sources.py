"""Where a model's tensors come from when its projections are quantised: another source underneath, other linears made.

The routers of experts are not quantised, as in vLLM: they are small, and count most. Nor is the head, here; on a CPU
with native kernels engine/models/packed.py quantises it to 8-bit integers where the projections are int8 or int4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from engine.model_config import ModelError
from engine.models.linear import Linear, LinearSource
from engine.quantization.formats import PackedFormat, WeightFormat
from engine.quantization.fp8 import quantise_fp8
from engine.quantization.int4 import GROUP_INPUTS, int4_linear, quantise_int4, stack_int4
from engine.quantization.int8 import quantise_int8
from engine.quantization.packed import StoredTensors, read_packed
from engine.quantization.stacked import StackedLinear

KEPT_MODULES = ("lm_head", ".gate", ".router")


class Quantiser(Protocol):
    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None, columns: slice | None = None) -> Linear:
        """From a float32 weight. `columns`: the inputs that are kept, as they are with all others; None: all."""


class Rows(NamedTuple):
    """Weights with all inputs that the checkpoint has, since some forms have a scale for all of a row."""

    weight: torch.Tensor  # [outputs, inputs]
    columns: slice | None  # of the inputs, those that this model computes; None: all
    bias: torch.Tensor | None  # [outputs]


class DenseTensors(LinearSource, StoredTensors, Protocol):
    """Plain tensors by name, as engine/weights.py reads them."""

    def take(self, name: str, *shape: int) -> torch.Tensor: ...

    def take_parts(
        self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weights stacked to `[sum of sizes, inputs]` in `dtype`, and biases in the model's dtype."""

    def take_rows(
        self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool, dtype: torch.dtype
    ) -> Rows:
        """The same with all inputs of the checkpoint."""


def is_quantisable(module: str) -> bool:
    return not module.endswith(KEPT_MODULES)


class QuantisingTensors:
    """Quantises every projection of a plain checkpoint while it is read, one at a time."""

    def __init__(self, tensors: DenseTensors, format: WeightFormat, dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._quantise = quantiser(format, dtype)
        self._group_inputs = GROUP_INPUTS if format is WeightFormat.INT4 else 1

    def take(self, name: str, *shape: int) -> torch.Tensor:
        return self._tensors.take(name, *shape)

    def linear(self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool = False) -> Linear:
        """Where the checkpoint's inputs are no multiple of a group, the projection stays as it is.

        Raises: ModelError, also where they are and those of a rank are not.
        """
        whole_inputs = self._tensors.shape(f"{names[0]}.weight")[-1]
        if whole_inputs % self._group_inputs or not all(map(is_quantisable, names)):
            return self._tensors.linear(names, sizes, inputs, bias)
        if inputs % self._group_inputs:
            raise ModelError(
                f"{names[0]} has {inputs} inputs on each rank, and int4 needs a multiple of {self._group_inputs}: "
                "take fewer ranks (tensor-parallel) or another form (quantize)"
            )
        rows = self._tensors.take_rows(names, sizes, inputs, bias, torch.float32)
        return self._quantise(rows.weight, rows.bias, rows.columns)


def quantiser(format: WeightFormat, dtype: torch.dtype) -> Quantiser:
    """To linears whose activations are `dtype`."""
    if format is WeightFormat.INT8:
        return quantise_int8
    if format is WeightFormat.FP8:
        return quantise_fp8
    if format is WeightFormat.INT4:
        return Int4Quantiser(dtype)
    raise ValueError(f"{format} is not made while loading")


@dataclass(frozen=True, slots=True)
class Int4Quantiser:
    dtype: torch.dtype

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None, columns: slice | None = None) -> Linear:
        kept = weight if columns is None else weight[:, columns].contiguous()  # whole groups, each with its own scale
        return int4_linear(quantise_int4(kept), bias, self.dtype)


class PackedTensors:
    """An AWQ or GPTQ checkpoint. Projections that it left unquantised are read as they are."""

    def __init__(self, tensors: DenseTensors, packed: PackedFormat, dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._packed = packed
        self._dtype = dtype

    def take(self, name: str, *shape: int) -> torch.Tensor:
        return self._tensors.take(name, *shape)

    def linear(self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool = False) -> Linear:
        if not all(self._tensors.has(f"{name}.qweight") for name in names):
            return self._tensors.linear(names, sizes, inputs, bias)
        parts = [
            read_packed(self._tensors, self._packed, name, size, inputs)
            for name, size in zip(names, sizes, strict=True)
        ]
        biases = [self._bias(name, size, bias) for name, size in zip(names, sizes, strict=True)]
        whole = stack_int4(parts)
        if whole is None:
            made = (int4_linear(part, each, self._dtype) for part, each in zip(parts, biases, strict=True))
            return StackedLinear(tuple(made))
        given = [each for each in biases if each is not None]
        return int4_linear(whole, torch.cat(given) if given else None, self._dtype)

    def _bias(self, name: str, size: int, wanted: bool) -> torch.Tensor | None:
        stored = f"{name}.bias"
        if not wanted and not self._tensors.has(stored):
            return None
        bias = self._tensors.take(stored, size)
        if wanted:
            return bias
        if bias.any():  # some quantisers write zeros where the model has no bias
            raise ModelError(f"the checkpoint has {stored}, which this model does not use")
        return None
