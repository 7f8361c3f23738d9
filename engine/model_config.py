"""What the decoder needs to know of a checkpoint, read once and checked. What it cannot compute exactly, it refuses."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class ModelError(Exception):
    """This checkpoint cannot be served; the message names the file, field or tensor, and what is supported."""


class RopeKind(Enum):
    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. The last four fields mean something for LLAMA3 only, `factor` for LINEAR too."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool  # of the query, key and value projections
    output_bias: bool  # of attention's output projection
    qk_norm: bool  # RMSNorm over head_dim on queries and keys, before rotation
    sliding_window: tuple[int | None, ...]  # per layer: tokens a query sees, itself included; None sees all
    eos_token_ids: frozenset[int]


def read_model_config(folder: Path) -> ModelConfig:
    """The configuration of the checkpoint in `folder`; raises ModelError for what is missing or not supported.

    Defaults of absent fields and old spellings (`rope_theta`, `rope_scaling`) are resolved by transformers.
    """
    raw = read_json(folder / "config.json")
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"config.json: model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    _refuse(raw, "quantization_config", supported=(None,))
    try:
        config = AutoConfig.from_pretrained(folder)
    except (StrictDataclassError, ValueError, TypeError, KeyError, OSError) as error:
        raise ModelError(f"{folder / 'config.json'}: {error}") from error
    fields: dict[str, Any] = config.to_dict()
    _refuse(fields, "hidden_act", supported=("silu",))
    _refuse(fields, "mlp_bias", supported=(None, False))
    heads = int(fields["num_attention_heads"])
    kv_heads = int(fields.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ModelError(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    bias = bool(fields.get("attention_bias", False))
    return ModelConfig(
        family=family,
        vocab_size=int(fields["vocab_size"]),
        hidden_size=int(fields["hidden_size"]),
        intermediate_size=int(fields["intermediate_size"]),
        num_layers=int(fields["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=int(fields.get("head_dim") or int(fields["hidden_size"]) // heads),
        max_positions=int(fields["max_position_embeddings"]),
        rms_norm_eps=float(fields["rms_norm_eps"]),
        rope=_rope(fields["rope_parameters"]),
        tie_word_embeddings=bool(fields["tie_word_embeddings"]),
        attention_bias=bias or family == "qwen2",
        output_bias=bias and family != "qwen2",
        qk_norm=family == "qwen3",
        sliding_window=_sliding_window(family, fields),
        eos_token_ids=_eos_token_ids(folder, fields),
    )


def read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{path}: not a JSON object")
    return loaded


def _refuse(fields: Mapping[str, Any], name: str, supported: tuple[Any, ...]) -> None:
    value = fields.get(name)
    if value not in supported:
        raise ModelError(f"config.json: {name} {value!r} is not supported; supported: {supported}")


def _rope(parameters: Mapping[str, Any]) -> RopeConfig:
    _refuse(parameters, "partial_rotary_factor", supported=(None, 1.0))
    name = parameters.get("rope_type", "default")
    try:
        kind = RopeKind(name)
        theta = float(parameters["rope_theta"])
        if kind is RopeKind.DEFAULT:
            return RopeConfig(kind, theta)
        factor = float(parameters["factor"])
        if kind is RopeKind.LINEAR:
            return RopeConfig(kind, theta, factor)
        low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
        return RopeConfig(kind, theta, factor, low, high, int(parameters["original_max_position_embeddings"]))
    except ValueError as error:
        supported = ", ".join(kind.value for kind in RopeKind)
        raise ModelError(f"config.json: rope_type {name!r} is not supported; supported: {supported}") from error
    except (KeyError, TypeError) as error:
        raise ModelError(f"config.json: rope_parameters of type {name!r} miss or mistype {error}") from error


def _sliding_window(family: str, fields: Mapping[str, Any]) -> tuple[int | None, ...]:
    layers = int(fields["num_hidden_layers"])
    window = fields.get("sliding_window")
    if family == "llama" or window is None:
        return (None,) * layers
    if int(window) < 1:
        raise ModelError(f"config.json: sliding_window {window} must be at least 1")
    if family == "mistral":
        return (int(window),) * layers
    kinds = {"full_attention": None, "sliding_attention": int(window)}
    unknown = set(fields["layer_types"]) - kinds.keys()
    if unknown or len(fields["layer_types"]) != layers:
        raise ModelError(f"config.json: layer_types must name {layers} layers, each one of {', '.join(kinds)}")
    return tuple(kinds[kind] for kind in fields["layer_types"])


def _eos_token_ids(folder: Path, fields: Mapping[str, Any]) -> frozenset[int]:
    ids = fields.get("eos_token_id")
    path = folder / "generation_config.json"
    if path.exists():
        stated = read_json(path).get("eos_token_id")
        ids = ids if stated is None else stated
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, list) else [ids])
