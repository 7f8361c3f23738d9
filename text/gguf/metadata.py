"""Metadata of a GGUF file, by the keys of its architecture, and the fields of config.json that decoders share.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's gguf-py/gguf/constants.py.
"""

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from baton.text.gguf.header import GgufHeader, GgufRefused, TensorType

EMBEDDING, HEAD, LONG_FACTORS, SHORT_FACTORS, ROPE_FACTORS = (
    "token_embd.weight",
    "output.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
    "rope_freqs.weight",
)
DEFAULT_ROPE_THETA = 10000.0


class GgufMetadata:
    """Metadata of an architecture. Raises GgufRefused for a missing key, and for a value that varies between layers.

    `varies`: whether values may vary between layers; `layers` returns all of them, `get` the largest one.
    """

    def __init__(self, header: GgufHeader, varies: bool = False) -> None:
        self.header = header
        self._prefix = header.architecture
        self._varies = varies

    def layers(self, key: str) -> list[Any]:
        """Return the value of each layer."""
        value = self.header.metadata.get(f"{self._prefix}.{key}", self[key])
        return list(value) if isinstance(value, tuple) else [value] * int(self["block_count"])

    def get(self, key: str, default: Any = None) -> Any:
        value = self.header.metadata.get(f"{self._prefix}.{key}", default)
        if isinstance(value, tuple):
            if len(set(value)) != 1 and not (value and self._varies):
                raise GgufRefused(f"{self._prefix}.{key} differs between layers, which is not supported")
            return max(value)
        return value

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise GgufRefused(f"has no {self._prefix}.{key}")
        return value

    @property
    def block_count(self) -> int:
        """Number of layers, without those for multi-token prediction, which follow the others. Raises: GgufRefused."""
        stated, unused = int(self["block_count"]), int(self.get("nextn_predict_layers") or 0)
        tensors = len(self.header.tensors)
        if not 0 <= unused < stated <= tensors:
            raise GgufRefused(
                f"{self._prefix}.block_count {stated} with nextn_predict_layers {unused} is not possible in a file of "
                f"{tensors} tensors"
            )
        return stated - unused

    def positive(self, key: str) -> int:
        """Return an integer. Raises: GgufRefused if it is missing or less than 1."""
        value = int(self[key])
        if value < 1:
            raise GgufRefused(f"{self._prefix}.{key} is {value}; it must be at least 1")
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    def rows(self, tensor: str) -> int:
        """Return the number of rows of a matrix, or of each expert's. Raises: GgufRefused if there is none.

        Older converters store a matrix of one row as a vector.
        """
        if not self.has(tensor):
            raise GgufRefused(f"has no tensor {tensor}")
        shape = self.header.tensors[tensor].shape
        return shape[-2] if len(shape) > 1 else 1

    def with_tensor(self, name: str) -> list[int]:
        """Return the layers that have a tensor: `name` as in `blk.0.name`."""
        return [index for index in range(self.block_count) if self.has(f"blk.{index}.{name}")]

    def numbers(self, tensor: str) -> list[float]:
        """Return the numbers of a float32 tensor. Raises: GgufRefused if it has another type."""
        described = self.header.tensors[tensor]
        if described.type is not TensorType.F32:
            raise GgufRefused(f"tensor {tensor} is {described.type.name}; supported is F32")
        with described.path.open("rb") as file:
            file.seek(described.start)
            content = file.read(described.stored_bytes)
        return list(struct.unpack(f"<{len(content) // 4}f", content))


Fields = Callable[[GgufMetadata, Mapping[str, Any]], dict[str, Any]]
"""Function that returns the fields of config.json that differ from Llama's. `config`: Llama's."""


def llama_fields(data: GgufMetadata) -> dict[str, Any]:
    """Return the fields of a Llama with the sizes of a file."""
    heads, hidden = data.positive("attention.head_count"), data.positive("embedding_length")
    head_dim = int(data.get("attention.key_length") or hidden // heads)
    return {
        "vocab_size": data.rows(EMBEDDING),
        "hidden_size": hidden,
        "intermediate_size": int(data.get("feed_forward_length") or data["expert_feed_forward_length"]),
        "num_hidden_layers": data.block_count,
        "num_attention_heads": heads,
        "num_key_value_heads": int(data.get("attention.head_count_kv") or heads),
        "head_dim": head_dim,
        "max_position_embeddings": int(data["context_length"]),
        "rms_norm_eps": norm_epsilon(data),
        "hidden_act": "silu",
        "tie_word_embeddings": not data.has(HEAD),
        "attention_bias": bool(data.with_tensor("attn_q.bias")),
        "mlp_bias": bool(data.with_tensor("ffn_up.bias")),
        "rope_parameters": rope_fields(data, head_dim),
        "dtype": dtype_of(data.header),
    }


def norm_epsilon(data: GgufMetadata) -> float:
    """Return the epsilon of norms. Converters do not always choose the key by the kind of norm."""
    return shortest(data.get("attention.layer_norm_epsilon") or data["attention.layer_norm_rms_epsilon"])


def shortest(number: float) -> float:
    """Return the decimal number that was stored as this float32: 1e-05 for 9.999999747378752e-06."""
    return float(f"{number:.7g}")


def dtype_of(header: GgufHeader) -> str:
    """Return the dtype for computing: that of the projections if they are plain, else bfloat16."""
    kinds = {tensor.type for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return "float32" if kinds == {TensorType.F32} else "bfloat16"


def rope_fields(data: GgufMetadata, head_dim: int) -> dict[str, Any]:
    """Return the rotary parameters."""
    parameters: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(data.get("rope.freq_base") or DEFAULT_ROPE_THETA),
    }
    rotated = int(data.get("rope.dimension_count") or head_dim)
    if rotated != head_dim:
        parameters["partial_rotary_factor"] = rotated / head_dim
    if data.has(ROPE_FACTORS):  # numbers that divide the frequencies, as of Llama 3.1
        factors = data.numbers(ROPE_FACTORS)
        return parameters | _divided(factors, factors, int(data["context_length"]), 1.0)
    if data.has(SHORT_FACTORS):
        original = int(data["rope.scaling.original_context_length"])
        found = _divided(data.numbers(SHORT_FACTORS), data.numbers(LONG_FACTORS), original, None)
        attention = data.get("rope.scaling.attn_factor")
        return parameters | found | ({} if attention is None else {"attention_factor": float(attention)})
    kind = data.get("rope.scaling.type", "none")
    factor = float(data.get("rope.scaling.factor") or 1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return parameters
    if kind == "linear":
        return {**parameters, "rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = int(data["rope.scaling.original_context_length"])
        turns = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attn_factor"}
        stated = {name: data.get(f"rope.scaling.yarn_{key}") for name, key in turns.items()}
        parameters |= {name: shortest(each) for name, each in stated.items() if each is not None}
        return {**parameters, "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise GgufRefused(f"rope.scaling.type {kind!r} is not supported; supported are none, linear and yarn")


def _divided(short: list[float], long: list[float], original: int, attention: float | None) -> dict[str, Any]:
    found = {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
    }
    return found if attention is None else {**found, "attention_factor": attention}


def windows(layers: int, period: int) -> list[str]:
    """Return the kinds of layers of which the last one of every `period` has no window."""
    return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]


def grouped_experts(data: GgufMetadata) -> dict[str, Any]:
    """Return the fields of experts in groups, and of shared ones."""
    return {
        "n_routed_experts": int(data["expert_count"]),
        "n_shared_experts": int(data.get("expert_shared_count") or 0),
        "num_experts_per_tok": int(data["expert_used_count"]),
        "moe_intermediate_size": int(data["expert_feed_forward_length"]),
        "first_k_dense_replace": int(data.get("leading_dense_block_count") or 0),
        "n_group": int(data.get("expert_group_count") or 1),
        "topk_group": int(data.get("expert_group_used_count") or 1),
        "norm_topk_prob": bool(data.get("expert_weights_norm", True)),
        "routed_scaling_factor": float(data.get("expert_weights_scale") or 1.0),
    }


def granite_scales(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the factors of Granite."""
    return {
        "embedding_multiplier": float(data.get("embedding_scale") or 1.0),
        "residual_multiplier": float(data.get("residual_scale") or 1.0),
        "attention_multiplier": float(data.get("attention.scale") or 1 / math.sqrt(config["head_dim"])),
        "logits_scaling": float(data.get("logit_scale") or 1.0),
    }
