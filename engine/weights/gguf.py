"""Tensors of a GGUF file by Hugging Face's names, and projections that stay as the file stores them.

Projections stay as stored. The embedding is spelled out, since rows of it are looked up; so is a head tied to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.engine.config.model_config import ModelConfig, ModelError
from baton.engine.models.batch import AdapterRows
from baton.engine.models.linear import DenseLinear, Linear
from baton.engine.weights.gguf_file import (
    ARCHITECTURES,
    UNUSED,
    GgufTensor,
    TensorType,
    dequantise,
    gguf_name,
    halves_again,
    is_interleaved,
    map_file,
    read_header,
)
from baton.engine.weights.quantised import StackedLinear, tiled_linear


@dataclass(frozen=True, slots=True)
class GgufLinear:
    weight: torch.Tensor  # uint8 [out, bytes of a row]
    type: TensorType
    bias: torch.Tensor | None  # [out]

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        return tiled_linear(
            x, len(self.weight), lambda tile: dequantise(self.weight[tile], self.type).to(x.dtype), self.bias
        )

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        return (self.weight,)


PLAIN_TYPES = (TensorType.F32, TensorType.F16, TensorType.BF16)


class GgufTensors:
    """Each tensor is taken at most once."""

    def __init__(self, path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Raises: ModelError where the file is of another architecture than config.json."""
        header = read_header(path)
        if header.architecture not in ARCHITECTURES.get(config.family, ()):
            raise ModelError(
                f"{path}: architecture {header.architecture!r} is not read for config.json's {config.family!r}; read "
                f"are files of llama, mistral, qwen2 and qwen3"
            )
        self._architecture = header.architecture
        self._left = dict(header.tensors)
        self._file = map_file(path)
        self._head_dim = config.head_dim
        self._dtype = dtype
        self._device = device

    def take(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._find(name, shape)
        stored = self._stored(tensor, name)
        return dequantise(stored, tensor.type).view(shape).to(self._dtype)

    def linear(self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool = False) -> Linear:
        """Parts of the same type become one."""
        weights = [f"{name}.weight" for name in names]
        tensors = [self._find(name, (size, inputs)) for name, size in zip(weights, sizes, strict=True)]
        stored = [self._stored(tensor, name) for tensor, name in zip(tensors, weights, strict=True)]
        biases = [self.take(f"{name}.bias", size) for name, size in zip(names, sizes, strict=True)] if bias else []
        types = {tensor.type for tensor in tensors}
        if len(types) == 1:
            return self._projection(torch.cat(stored), types.pop(), torch.cat(biases) if bias else None)
        given: Sequence[torch.Tensor | None] = biases or [None] * len(names)
        return StackedLinear(
            tuple(
                self._projection(part, tensor.type, each)
                for part, tensor, each in zip(stored, tensors, given, strict=True)
            )
        )

    def check_all_taken(self, ignore: set[str]) -> None:
        left = sorted(self._left.keys() - UNUSED - {gguf_name(name) for name in ignore})
        if left:
            raise ModelError(f"the GGUF file has {len(left)} tensors this model does not use, among them {left[0]}")

    def _projection(self, stored: torch.Tensor, kind: TensorType, bias: torch.Tensor | None) -> Linear:
        if kind in PLAIN_TYPES:
            return DenseLinear(dequantise(stored, kind).to(self._dtype), bias)
        return GgufLinear(stored, kind, bias)

    def _find(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        known = gguf_name(name)
        tensor = self._left.pop(known, None) if known else None
        if tensor is None:
            raise ModelError(f"the GGUF file has no tensor {known or name}")
        if tensor.shape != shape:
            raise ModelError(f"tensor {known} is {list(tensor.shape)}, config.json implies {list(shape)}")
        return tensor

    def _stored(self, tensor: GgufTensor, name: str) -> torch.Tensor:
        """A copy of its rows, uint8 [rows, bytes of a row], in the order of Hugging Face's checkpoints."""
        stored = self._file[tensor.start : tensor.start + tensor.stored_bytes].view(-1, tensor.row_bytes)
        if is_interleaved(self._architecture, name):
            # A bias is one row; its numbers move instead.
            moved = stored.view(tensor.shape[0], -1)
            stored = halves_again(moved, self._head_dim).view(stored.shape)
        return stored.to(self._device, copy=True)
