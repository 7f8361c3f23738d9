"""config.json to the engine's configuration, once and checked. A model that cannot be computed exactly is refused.

Most state all that the decoder needs. Reading those needs nothing of transformers, whose import costs a starting
process as much CPU time as that of torch. A field that is left out, spelled in another way or of another type is not
guessed here: transformers resolves it.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from baton.engine.config.model_config import (
    CONFIG_FILE,
    DecoderConfig,
    ExpertsConfig,
    ModelConfig,
    ModelError,
    RopeConfig,
    RopeKind,
    read_json,
)
from baton.engine.weights.formats import packed_format

WINDOWED_FAMILIES = ("mistral", "mixtral", "qwen3_moe")  # one window for all layers, or none
DECODER_FAMILIES = ("llama", "qwen2", "qwen3", *WINDOWED_FAMILIES)
LAYER_KINDS = ("full_attention", "sliding_attention")
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
INTEGERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
OPTIONAL_FLAGS = ("attention_bias", "mlp_bias")  # that mean the same in each family, and false where they are absent
ROPE_SPELLINGS = ("rope_parameters", "rope_scaling", "rope_theta")
NEEDS_TRANSFORMERS = ("auto_map", "text_config", "original_max_position_embeddings", "partial_rotary_factor")


def read_model_config(folder: Path) -> ModelConfig:
    """The configuration of the checkpoint in `folder`: a DecoderConfig where our own decoder computes the model.

    Raises: ModelError for missing fields, and for a model that neither the decoder nor transformers' code can serve.
    """
    raw = read_json(folder / CONFIG_FILE)
    packed = packed_format(raw)
    fields = stated_fields(raw)
    if fields is not None:
        with suppress(NotInDecoderError):
            return decoder_config(fields, _eos_token_ids(folder, fields["eos_token_id"]))
    # Seconds to import, as is transformers' modelling code below; few checkpoints need either.
    from baton.engine.config.resolved_config import end_of_text, fields_of, read_transformers_config

    config = read_transformers_config(folder)
    eos_token_ids = _eos_token_ids(folder, end_of_text(config))
    if config.model_type in DECODER_FAMILIES:
        with suppress(NotInDecoderError):
            return decoder_config(fields_of(config), eos_token_ids)
    if packed is not None:
        raise ModelError(f"config.json: quantization_config is supported for {', '.join(DECODER_FAMILIES)} only")
    from baton.engine.models.transformers_config import transformers_config

    return transformers_config(config, eos_token_ids)


def _eos_token_ids(folder: Path, ids: Any) -> frozenset[int]:
    path = folder / "generation_config.json"
    if path.exists():
        stated = read_json(path).get("eos_token_id")
        ids = ids if stated is None else stated
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, list) else [ids])


class NotInDecoderError(ModelError):
    """A feature that the decoder lacks, though its family is known."""


def decoder_config(fields: Mapping[str, Any], eos_token_ids: frozenset[int]) -> DecoderConfig:
    """`fields` as transformers names them. Raises: NotInDecoderError; ModelError for an impossible configuration."""
    family = fields["model_type"]
    _check(fields, "hidden_act", supported=("silu",))
    _check(fields, "mlp_bias", supported=(None, False))
    heads = int(fields["num_attention_heads"])
    kv_heads = int(fields.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ModelError(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    bias = bool(fields.get("attention_bias", False))
    return DecoderConfig(
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
        qk_norm=family in ("qwen3", "qwen3_moe"),
        sliding_window=_sliding_window(family, fields),
        eos_token_ids=eos_token_ids,
        experts=_experts(family, fields),
    )


def _check(fields: Mapping[str, Any], name: str, supported: tuple[Any, ...]) -> None:
    value = fields.get(name)
    if value not in supported:
        raise NotInDecoderError(f"config.json: {name} {value!r} is not supported; supported: {supported}")


def _rope(parameters: Mapping[str, Any]) -> RopeConfig:
    _check(parameters, "partial_rotary_factor", supported=(None, 1.0))
    name = parameters.get("rope_type", "default")
    if name not in [kind.value for kind in RopeKind]:
        raise NotInDecoderError(f"config.json: rope_type {name!r} is not supported")
    kind = RopeKind(name)
    try:
        theta = float(parameters["rope_theta"])
        if kind is RopeKind.DEFAULT:
            return RopeConfig(kind, theta)
        factor = float(parameters["factor"])
        if kind is RopeKind.LINEAR:
            return RopeConfig(kind, theta, factor)
        low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
        return RopeConfig(kind, theta, factor, low, high, int(parameters["original_max_position_embeddings"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"config.json: rope_parameters of type {name!r} miss or mistype {error}") from error


def _sliding_window(family: str, fields: Mapping[str, Any]) -> tuple[int | None, ...]:
    layers = int(fields["num_hidden_layers"])
    window = fields.get("sliding_window")
    if family == "llama" or window is None:
        return (None,) * layers
    if int(window) < 1:
        raise ModelError(f"config.json: sliding_window {window} must be at least 1")
    if family in WINDOWED_FAMILIES:
        return (int(window),) * layers
    kinds = fields["layer_types"]
    if not set(kinds) <= set(LAYER_KINDS) or len(kinds) != layers:
        raise ModelError(f"config.json: layer_types must name {layers} layers, each one of {', '.join(LAYER_KINDS)}")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _experts(family: str, fields: Mapping[str, Any]) -> ExpertsConfig | None:
    """transformers' modeling_mixtral.py and modeling_qwen3_moe.py define the layers, and how weights are normalised."""
    if family == "mixtral":
        inner, layers, normalised = fields["intermediate_size"], frozenset(range(fields["num_hidden_layers"])), True
    elif family == "qwen3_moe" and fields["num_local_experts"]:
        step, dense = fields["decoder_sparse_step"], fields["mlp_only_layers"]
        every = range(fields["num_hidden_layers"])
        layers = frozenset(index for index in every if index not in dense and (index + 1) % step == 0)
        inner, normalised = fields["moe_intermediate_size"], fields["norm_topk_prob"]
    else:
        return None
    count, per_token = fields["num_local_experts"], fields["num_experts_per_tok"]
    if not 1 <= per_token <= count:
        raise ModelError(f"config.json: num_experts_per_tok {per_token} is not in 1 to {count}, the number of experts")
    return ExpertsConfig(layers, count, per_token, inner, normalised)


def stated_fields(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fields as transformers would give them, or None where only transformers knows one of them."""
    rope = _rope_parameters(raw)
    if rope is None or not _is_complete(raw):
        return None
    fields = {name: value for name, value in raw.items() if name not in ROPE_SPELLINGS}
    if raw["model_type"].startswith("qwen"):
        fields["sliding_window"] = None  # _has_window: they state that they use none
    return {**fields, "rope_parameters": rope}


def _is_complete(raw: Mapping[str, Any]) -> bool:
    return (
        raw.get("model_type") in FAMILIES
        and not any(name in raw for name in NEEDS_TRANSFORMERS)
        and all(_is_count(raw.get(name)) for name in INTEGERS)
        and raw["hidden_size"] % raw["num_attention_heads"] == 0
        and isinstance(raw.get("rms_norm_eps"), float)
        and isinstance(raw.get("hidden_act"), str)
        and isinstance(raw.get("tie_word_embeddings"), bool)
        and all(isinstance(raw.get(name, False), bool) for name in OPTIONAL_FLAGS)
        and _has_head_dim(raw)
        and _has_window(raw)
        and _has_end(raw)
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _has_head_dim(raw: Mapping[str, Any]) -> bool:
    head_dim = raw.get("head_dim")
    # Without one it is hidden_size over heads, but for qwen3, which has a default.
    return _is_count(head_dim) or (head_dim is None and raw["model_type"] != "qwen3")


def _has_window(raw: Mapping[str, Any]) -> bool:
    if raw["model_type"] == "llama":
        return True
    if raw["model_type"] == "mistral":
        return "sliding_window" in raw and (raw["sliding_window"] is None or _is_count(raw["sliding_window"]))
    return raw.get("use_sliding_window") is False


def _has_end(raw: Mapping[str, Any]) -> bool:
    ids = raw.get("eos_token_id")
    return all(type(token_id) is int for token_id in (ids if isinstance(ids, list) else [ids]))


def _rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of one spelling, new or old; None for both at once and for less than all of it."""
    new, scaling, theta = (raw.get(name) for name in ROPE_SPELLINGS)
    if new is not None:
        found = new if scaling is None and theta is None else None
    else:
        found = {"rope_type": "default"} if scaling is None else scaling
        found = {"rope_theta": theta, **found} if isinstance(found, dict) and theta is not None else None
    if not isinstance(found, dict) or not isinstance(found.get("rope_theta"), int | float):
        return None
    kind = found.get("rope_type")
    if kind == "llama3":
        return found if "original_max_position_embeddings" in found else None
    return found if kind in ("default", "linear") else None
