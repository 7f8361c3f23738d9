"""Models of well-known shapes with random weights, generated on the device."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import DecoderConfig
from baton.engine.load import DecoderParts
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.linear import MatmulBackend
from baton.engine.weights.read import Size, parts_of
from baton.engine.weights.weight import PlainWeight, Weight

SHAPES: dict[str, dict[str, Any]] = {
    "llama8b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "qwen0.6b": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512, "head_dim": 32}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
STATED = {"eos_token_id": None, "bos_token_id": None, "hidden_act": "silu", "torch_dtype": "bfloat16"}


class DrawnTensors:
    """`WeightSource` of random weights: projections scaled to keep activations in range, norms of ones."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        return made.fill_(1.0) if name.endswith("norm.weight") else made.normal_(std=shape[-1] ** -0.5)

    def number(self, name: str) -> float:
        return float(self.tensor(name, 1))

    def embedding(self, name: str, vocabulary: int, hidden: int) -> torch.Tensor:
        return self.tensor(name, vocabulary, hidden)

    def weight(self, names: Sequence[str], sizes: Sequence[Size], inputs: int, bias: bool = False) -> Weight:
        outputs = sum(map(sum, parts_of(names, sizes)))
        numbers = self.tensor(names[0], outputs, inputs)
        return PlainWeight(numbers, self.tensor(f"{names[0]}.bias", outputs) if bias else None)


class KeptTensors(DrawnTensors):
    """Unfused random weights that stay in `tensors`, by their names in a checkpoint."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self.tensors: dict[str, torch.Tensor] = {}

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        self.tensors[name] = super().tensor(name, *shape, dtype=dtype)
        return self.tensors[name]

    def weight(self, names: Sequence[str], sizes: Sequence[Size], inputs: int, bias: bool = False) -> Weight:
        outputs = map(sum, parts_of(names, sizes))
        parts = [self.tensor(f"{name}.weight", size, inputs) for name, size in zip(names, outputs, strict=True)]
        return PlainWeight(parts[0])  # any weight will do: the model is never run


def write_config(folder: Path, shape: str, dry: bool, **others: int) -> DecoderConfig:
    """Write `folder`/config.json and return its content. `others`: fields that are not part of the shape."""
    fields = {**SHAPES[shape], **(TINY if dry else {}), **STATED, **others}
    (folder / "config.json").write_text(json.dumps(fields))
    config = read_model_config(folder)
    assert isinstance(config, DecoderConfig)
    return config


def drawn_model(folder: Path, shape: str, device: torch.device, dry: bool, **others: int) -> DecoderModel:
    """Create a model with random weights in bf16, and write its config.json to `folder`."""
    torch.manual_seed(0)
    return _drawn(DrawnTensors(torch.bfloat16, device), write_config(folder, shape, dry, **others), device)


def _drawn(source: DrawnTensors, config: DecoderConfig, device: torch.device) -> DecoderModel:
    return DecoderParts(source, MatmulBackend(device, torch.bfloat16)).decoder(config)


def write_checkpoint(folder: Path, shape: str, device: torch.device, dry: bool) -> Path:
    """Write a checkpoint with random weights for workers and transformers."""
    torch.manual_seed(0)
    drawn = KeptTensors(torch.bfloat16, device)
    _drawn(drawn, write_config(folder, shape, dry), device)
    save_file(
        {name: tensor.cpu() for name, tensor in drawn.tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder
