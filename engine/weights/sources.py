"""Where a model's tensors come from when its projections are quantised, AWQ and GPTQ among them.

AWQ: https://arxiv.org/abs/2306.00978, its "gemm" packing. GPTQ: https://arxiv.org/abs/2210.17323.

The routers of experts are not quantised, as in vLLM: they are small, and count most. Nor is the head, here; on a CPU
with native kernels engine/models/packed.py quantises it to 8-bit integers where the projections are int8 or int4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from baton.engine.config.model_config import ModelError
from baton.engine.models.linear import Linear, LinearSource
from baton.engine.weights.formats import PackedFormat, WeightFormat
from baton.engine.weights.quantised import (
    GROUP_INPUTS,
    Int4Weight,
    StackedLinear,
    int4_linear,
    quantise_fp8,
    quantise_int4,
    quantise_int8,
    stack_int4,
)

PER_WORD = 8
# The nibble of an AWQ word, lowest first, that holds each of its eight columns.
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
ONE_IN_EACH_NIBBLE = 0x11111111
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class StoredTensors(Protocol):
    """Tensors of a checkpoint by name, in any dtype."""

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises: ModelError if absent."""

    def take_stored(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> torch.Tensor:
        """As stored, on the device to compute on; raises ModelError if absent, misshapen or of another dtype."""


def read_packed(tensors: StoredTensors, packed: PackedFormat, module: str, outputs: int, inputs: int) -> Int4Weight:
    """The module's qweight, qzeros, scales and, for GPTQ, g_idx. Raises: ModelError."""
    groups = tensors.shape(f"{module}.scales")[0]
    if inputs % PER_WORD or outputs % PER_WORD or not groups or inputs % groups:
        raise ModelError(f"{module} of {outputs} x {inputs} in {groups} groups cannot be read as 4-bit weights")
    scales = tensors.take_stored(f"{module}.scales", SCALE_DTYPES, groups, outputs)
    qzeros = tensors.take_stored(f"{module}.qzeros", (torch.int32,), groups, outputs // PER_WORD)
    if packed.format is WeightFormat.AWQ:
        qweight = tensors.take_stored(f"{module}.qweight", (torch.int32,), inputs, outputs // PER_WORD)
        codes, zeros = (_nibbles(words)[..., AWQ_NIBBLES].flatten(1) for words in (qweight, qzeros))
        return Int4Weight(codes.T.contiguous(), scales.T.contiguous(), zeros.T.contiguous(), None)
    qweight = tensors.take_stored(f"{module}.qweight", (torch.int32,), inputs // PER_WORD, outputs)
    if packed.zeros_less_one:
        # Whole words, as GPTQModel does: where a zero point was 0, the subtraction had borrowed from its neighbour.
        qzeros = qzeros + ONE_IN_EACH_NIBBLE
    codes = _nibbles(qweight.T).flatten(1)  # [out, in]
    zeros = _nibbles(qzeros).flatten(1).T.contiguous()
    order = _column_order(tensors, module, inputs, groups)
    return Int4Weight(codes if order is None else codes[:, order], scales.T.contiguous(), zeros, order)


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """int32 [...] to uint8 [..., 8], lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).to(torch.uint8)


def _column_order(tensors: StoredTensors, module: str, inputs: int, groups: int) -> torch.Tensor | None:
    """The inputs sorted by their group; None where they are already."""
    groups_of_inputs = tensors.take_stored(f"{module}.g_idx", (torch.int32,), inputs).long()
    order = groups_of_inputs.argsort(stable=True)
    expected = torch.arange(inputs, device=order.device) // (inputs // groups)
    if not torch.equal(groups_of_inputs[order], expected):
        raise ModelError(f"{module}.g_idx does not put {inputs // groups} inputs into each of {groups} groups")
    return None if torch.equal(groups_of_inputs, expected) else order


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
    """Plain tensors by name, as engine/weights/load.py reads them."""

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
