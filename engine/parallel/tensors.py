"""One rank's part of a checkpoint: the same source of tensors, with every projection cut while it is read."""

from collections.abc import Sequence
from enum import Enum

import torch

from engine.models.linear import DenseLinear, Linear
from engine.parallel.shard import Shard
from engine.quantization.sources import DenseTensors, Rows


class Cut(Enum):
    OUTPUTS = "outputs"  # of queries, keys, values, gates and ups: every rank computes some of them
    INPUTS = "inputs"  # of the layers after those: every rank computes a summand of all outputs
    VOCABULARY = "vocabulary"


CUTS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3"), Cut.OUTPUTS),
    **dict.fromkeys(("o_proj", "down_proj", "w2"), Cut.INPUTS),
    "lm_head": Cut.VOCABULARY,
}


class ShardedTensors:
    """`sizes` and `inputs` are those of this rank; of the head, `sizes` is the whole vocabulary."""

    def __init__(self, tensors: DenseTensors, shard: Shard, dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._shard = shard
        self._dtype = dtype

    def has(self, name: str) -> bool:
        return self._tensors.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(name)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        return self._tensors.take(name, *shape)

    def take_stored(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> torch.Tensor:
        return self._tensors.take_stored(name, dtypes, *shape)

    def linear(self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool = False) -> Linear:
        return DenseLinear(*self.take_parts(names, sizes, inputs, bias, self._dtype))

    def take_parts(
        self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight, columns, own_bias = self.take_rows(names, sizes, inputs, bias, dtype)
        return weight if columns is None else weight[:, columns].clone(), own_bias

    def take_rows(
        self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool, dtype: torch.dtype
    ) -> Rows:
        shard, cuts = self._shard, {CUTS[name.rpartition(".")[2]] for name in names}
        if cuts == {Cut.INPUTS} and shard.degree > 1:
            weight, _, whole = self._tensors.take_rows(names, sizes, inputs * shard.degree, bias, dtype)
            columns = slice(shard.rank * inputs, (shard.rank + 1) * inputs)
            return Rows(weight, columns, whole if shard.rank == 0 else None)  # the bias is added once
        parts = [self._outputs(name, size, inputs, bias, dtype) for name, size in zip(names, sizes, strict=True)]
        biases = [each for _, each in parts if each is not None]
        return Rows(torch.cat([weight for weight, _ in parts]), None, torch.cat(biases) if biases else None)

    def _outputs(
        self, name: str, size: int, inputs: int, bias: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Copies, so that nothing keeps the whole tensor alive."""
        shard = self._shard
        if CUTS[name.rpartition(".")[2]] is Cut.VOCABULARY:
            part, whole_size = shard.vocabulary(size), size
        else:
            part, whole_size = range(shard.rank * size, (shard.rank + 1) * size), size * shard.degree
        weight, whole = self._tensors.take_parts([name], [whole_size], inputs, bias, dtype)
        rows = slice(part.start, part.stop)
        return weight[rows].clone(), None if whole is None else whole[rows].clone()
