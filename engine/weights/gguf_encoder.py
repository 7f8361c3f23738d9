"""Weights of encoders in GGUF files, by the names of transformers' models.

Names are those of llama.cpp's converter, convert_hf_to_gguf.py.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from baton.engine.config.model_config import ModelError
from baton.engine.weights.gguf_file import dequantise, map_file
from baton.engine.weights.gguf_names import gguf_names
from baton.text.gguf.encoders import DENSE
from baton.text.gguf.header import GgufTensor, read_model_header

TOP = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.tok_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "embeddings.norm": "token_embd_norm",
    "final_norm": "output_norm",
    "classifier.dense": "cls",
    "classifier.out_proj": "cls.output",
}
LAYER = {
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "attn_output_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_mlp_layernorm": "layer_output_norm",
    "attn_norm": "attn_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.Wo": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.Wi": "ffn_up",
    "mlp.Wo": "ffn_down",
}
PROJECTIONS = {
    "attention.self.query": "q",
    "attention.self.key": "k",
    "attention.self.value": "v",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
}
"""Modules of attention that a file may store together as `attn_qkv`."""
_LAYER = re.compile(r"(?:.+\.)?layers?\.(?P<layer>\d+)\.(?P<module>.+)\.(?P<kind>weight|bias)")
POSITIONS = "position_embd.weight"
GEMMA = "gemma-embedding"  # architecture with the names of decoders


class _StoredPart(NamedTuple):
    tensor: GgufTensor
    part: int | None  # index in `attn_qkv`, if that is the tensor
    shape: torch.Size  # shape of the part
    added: float = 0.0  # number that the converter added

    @property
    def rows(self) -> int:
        return self.shape[0] * (1 if self.part is None else 3)

    @property
    def stored(self) -> tuple[int, ...]:
        """Shape of the tensor. Older converters store a matrix of one row as a vector."""
        shape = self.tensor.shape
        return shape if len(shape) == len(self.shape) else (1, *shape)

    @property
    def grows(self) -> bool:
        """Whether the file lacks the rows of RoBERTa's positions up to the padding token's id, which no token has."""
        return self.tensor.name == POSITIONS and self.stored[0] < self.rows

    def check(self) -> None:
        """Raises: ModelError for another shape."""
        if self.stored[1:] != tuple(self.shape[1:]) or (self.stored[0] != self.rows and not self.grows):
            implied = [self.rows, *self.shape[1:]]
            raise ModelError(f"tensor {self.tensor.name} is {list(self.tensor.shape)}, config.json implies {implied}")


class GgufEncoderWeights:
    """Tensors of a GGUF file of an encoder."""

    def __init__(self, path: Path, shapes: Mapping[str, torch.Size], optional: tuple[str, ...]) -> None:
        """Find tensors of these shapes, by transformers' names, in a file or in all parts of a split one.

        Names that start with one of `optional` are left out. Raises: GgufRefused; ModelError for missing and surplus
        tensors, and for other shapes.
        """
        header = read_model_header(path)
        self._tensors, self._is_gemma = header.used_tensors, header.architecture == GEMMA
        self._places = {
            name: self._place(name, shape) for name, shape in shapes.items() if not name.startswith(optional)
        }
        used = {*DENSE.values(), *(place.tensor.name for place in self._places.values())}
        if left := self._tensors.keys() - used:
            raise ModelError(f"the GGUF file has {len(left)} tensors this model does not use, among them {min(left)}")

    def state(self) -> dict[str, torch.Tensor]:
        """Return float32 tensors by transformers' names."""
        files = {part: map_file(part) for part in dict.fromkeys(each.path for each in self._tensors.values())}
        return {name: _read(place, files[place.tensor.path]) for name, place in self._places.items()}

    def _place(self, name: str, shape: torch.Size) -> _StoredPart:
        """Find a tensor. Raises: ModelError if it is missing or has another shape."""
        part = None
        if self._is_gemma:
            known = (*gguf_names(f"model.{name}"), name)
            stored = next((each for each in known if each in self._tensors), known[0])
        elif (layer := _LAYER.fullmatch(name)) is None:
            module, _, kind = name.rpartition(".")
            ends = [each for each in TOP if module == each or module.endswith(f".{each}")]
            stored = f"{TOP[ends[0]]}.{kind}" if ends else name
        else:
            module, own = layer["module"], LAYER.get(layer["module"], layer["module"])
            if (letter := PROJECTIONS.get(module)) is not None:
                own = f"attn_{letter}"
                if f"blk.{layer['layer']}.{own}.{layer['kind']}" not in self._tensors:
                    own, part = "attn_qkv", "qkv".index(letter)
            stored = f"blk.{layer['layer']}.{own}.{layer['kind']}"
        if stored not in self._tensors:
            raise ModelError(f"the GGUF file has no tensor {stored}")
        added = 1.0 if self._is_gemma and name.endswith("norm.weight") else 0.0
        place = _StoredPart(self._tensors[stored], part, shape, added)
        place.check()
        return place


def _read(place: _StoredPart, file: torch.Tensor) -> torch.Tensor:
    tensor, shape = place.tensor, place.shape
    bytes_of_rows = file[tensor.start : tensor.start + tensor.stored_bytes]
    numbers = dequantise(bytes_of_rows.view(-1, tensor.row_bytes), tensor.type).view(place.stored)
    if place.part is not None:
        numbers = numbers.view(3, *shape)[place.part]
    if place.grows:
        numbers = torch.cat((numbers.new_zeros(place.rows - len(numbers), *shape[1:]), numbers))
    return numbers - place.added


def read_dense(path: Path, folder: str) -> torch.Tensor:
    """Return the weight of the linear layer that sentence-transformers stores in `folder`. Raises: GgufRefused."""
    tensor = read_model_header(path).tensors[DENSE[folder]]
    return _read(_StoredPart(tensor, None, torch.Size(tensor.shape)), map_file(tensor.path))
