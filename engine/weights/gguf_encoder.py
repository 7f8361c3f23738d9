"""Weights of encoders in GGUF files, by the names of transformers' models.

Names are those of llama.cpp's converter, convert_hf_to_gguf.py.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from baton.engine.config.model_config import ModelError
from baton.engine.weights.gguf_file import dequantise, map_file
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


class GgufEncoderWeights:
    """Tensors of a GGUF file of an encoder."""

    def __init__(self, path: Path) -> None:
        """Open the file, or all parts of the model that begins with it. Raises: GgufRefused."""
        self._tensors = read_model_header(path).used_tensors
        self._files = {part: map_file(part) for part in dict.fromkeys(each.path for each in self._tensors.values())}

    def state(self, shapes: Mapping[str, torch.Size], optional: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Return float32 tensors of these shapes by transformers' names.

        Names that start with one of `optional` are left out. Raises: ModelError for missing and surplus tensors, and
        for other shapes.
        """
        found = {}
        used: set[str] = set()
        for name, shape in shapes.items():
            if not name.startswith(optional):
                stored, part = self._place(name)
                used.add(stored)
                found[name] = self._read(self._tensors[stored], part, shape)
        if left := self._tensors.keys() - used:
            raise ModelError(f"the GGUF file has {len(left)} tensors this model does not use, among them {min(left)}")
        return found

    def _place(self, name: str) -> tuple[str, int | None]:
        """Return the GGUF name of a tensor, and its index in `attn_qkv` if that contains it. Raises: ModelError."""
        part = None
        if (layer := _LAYER.fullmatch(name)) is None:
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
        return stored, part

    def _read(self, tensor: GgufTensor, part: int | None, shape: torch.Size) -> torch.Tensor:
        # Older converters store a matrix of one row as a vector.
        stored = tensor.shape if len(tensor.shape) == len(shape) else (1, *tensor.shape)
        rows = shape[0] * (1 if part is None else 3)
        # Rows of RoBERTa's positions up to the padding token's id, which no token has, are not stored.
        grows = tensor.name == POSITIONS and stored[0] < rows
        if stored[1:] != tuple(shape[1:]) or (stored[0] != rows and not grows):
            raise ModelError(f"tensor {tensor.name} is {list(tensor.shape)}, config.json implies {[rows, *shape[1:]]}")
        bytes_of_rows = self._files[tensor.path][tensor.start : tensor.start + tensor.stored_bytes]
        numbers = dequantise(bytes_of_rows.view(-1, tensor.row_bytes), tensor.type).view(stored)
        if part is not None:
            numbers = numbers.view(3, *shape)[part]
        return torch.cat((numbers.new_zeros(rows - len(numbers), *shape[1:]), numbers)) if grows else numbers
