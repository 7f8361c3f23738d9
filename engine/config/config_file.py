"""Convert config.json to the engine's configuration, with checks. Models that cannot be computed exactly are rejected.

Most files state all that the decoder needs. They are read without transformers, whose import costs a starting process
as much CPU time as torch's. Missing fields, old spellings and other types are not guessed: transformers resolves them.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from baton.engine.config.experts import experts_config
from baton.engine.config.families import FAMILIES, Bias, Family, QueryScaling, Rotating, Windows
from baton.engine.config.gemma import gemma_config, pool_shape
from baton.engine.config.latent import latent_config, latent_scale
from baton.engine.config.limits import check_numbers, positive_sizes
from baton.engine.config.model_config import (
    CONFIG_FILE,
    Activation,
    DecoderConfig,
    GemmaConfig,
    LatentConfig,
    ModelConfig,
    ModelError,
    NotInDecoderError,
    QkNorm,
    QueryScale,
    RopeConfig,
    RopeKind,
    read_json,
)
from baton.engine.config.own_head import has_own_head
from baton.engine.config.recurrent import FEED_FORWARD, recurrent_config
from baton.engine.config.rope import rope_config
from baton.engine.config.spellings import SPELLINGS
from baton.engine.weights.files import has_head
from baton.engine.weights.formats import packed_format
from baton.kernels.types import SWIGLU_ALPHA, SWIGLU_LIMIT
from baton.text.generation_config import read_generation_config
from baton.text.host.files import reads
from baton.text.pooler_files import ModelKind, PoolingRefused, head_score, is_encoder, model_kind, read_pooler
from baton.text.weight_files import has_weights

CHUNKED = "chunked_attention"
LAYER_KINDS = ("full_attention", "sliding_attention")
STATED_FAMILIES = ("llama", "qwen2", "qwen3", "mistral")  # families that are read without transformers
INTEGERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
OPTIONAL_FLAGS = ("attention_bias", "mlp_bias")  # same meaning in each family; false if missing
ROPE_SPELLINGS = ("rope_parameters", "rope_scaling", "rope_theta")
NEEDS_TRANSFORMERS = ("auto_map", "text_config", "original_max_position_embeddings", "partial_rotary_factor")


@reads(ModelError, CONFIG_FILE)
def read_model_config(folder: Path) -> ModelConfig:
    """Read the configuration of the checkpoint in `folder`: a DecoderConfig if our own decoder computes the model.

    Raises: ModelError for missing fields, and for a model that neither the decoder nor transformers' code can serve.
    """
    config = _read(folder)
    read_pooler(folder)  # vectors of a checkpoint whose pooling is unreadable would be wrong
    if isinstance(config, DecoderConfig) and config.tie_word_embeddings and has_own_head(folder):
        return replace(config, tie_word_embeddings=False)
    return config


def _read(folder: Path) -> ModelConfig:
    raw = read_json(folder / CONFIG_FILE)
    check_numbers(folder / CONFIG_FILE, raw)
    packed = packed_format(folder)
    if is_encoder(raw):
        from baton.engine.config.encoders import encoder_config

        return encoder_config(folder)
    fields = stated_fields(raw)
    if fields is not None:
        with suppress(NotInDecoderError):
            return decoder_config(fields, _eos_token_ids(folder, fields["eos_token_id"]))
    # transformers takes seconds to import, and so does its modelling code below; few checkpoints need either.
    from baton.engine.config.resolved_config import end_of_text, fields_of, read_transformers_config, text_part

    config = read_transformers_config(folder)
    eos_token_ids, text = _eos_token_ids(folder, end_of_text(config)), text_part(config)
    if text.model_type in FAMILIES:
        with suppress(NotInDecoderError):
            decoder = decoder_config(fields_of(text), eos_token_ids)
            if text is config:
                return decoder
            tied = _is_tied(folder, raw.get("tie_word_embeddings"), config, decoder.tie_word_embeddings)
            return replace(decoder, is_text_part=True, tie_word_embeddings=tied)
    if packed is not None:
        raise ModelError(f"config.json: quantised weights are supported for {', '.join(FAMILIES)} only")
    from baton.engine.models.transformers_config import transformers_config

    return transformers_config(config, eos_token_ids)


def _is_tied(folder: Path, stated: bool | None, config: Any, of_text: bool) -> bool:
    """Return whether embedding and head of a text part are tied.

    transformers follows the field of the complete model, `config`, unless the checkpoint has a head. Its default
    differs from that of the text part, so files with only one of both fields are ambiguous: the checkpoint decides.
    """
    if getattr(config, "tie_word_embeddings", of_text) == of_text:
        return of_text
    if has_weights(folder):
        return not has_head(folder)
    return of_text if stated is None else stated


def _eos_token_ids(folder: Path, ids: Any) -> frozenset[int]:
    stated = read_generation_config(folder, ModelError).get("eos_token_id")
    ids = ids if stated is None else stated
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, list) else [ids])


def decoder_config(fields: Mapping[str, Any], eos_token_ids: frozenset[int]) -> DecoderConfig:
    """Convert `fields`, named as in transformers. Raises: NotInDecoderError; ModelError for invalid values."""
    name = fields["model_type"]
    family = FAMILIES[name]
    if name in SPELLINGS:
        fields = {**fields, **SPELLINGS[name](fields)}
    _check(fields, "mlp_bias", supported=(None, False))
    _check(fields, "use_bidirectional_attention", supported=(None, False, "vision"))  # "vision": only of images
    attention = _attention(family, fields)
    short = [rope.original_max_positions for rope in attention.ropes if rope.kind is RopeKind.LONGROPE]
    bias = bool(fields.get("attention_bias", False))
    labels, (chunk, chunked) = _labels(fields), _chunks(family, fields)
    return DecoderConfig(
        family=name,
        vocab_size=int(fields["vocab_size"]),
        hidden_size=int(fields["hidden_size"]),
        intermediate_size=_inner_size(fields),
        num_layers=int(fields["num_hidden_layers"]),
        num_heads=attention.heads,
        num_kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        max_positions=min([int(fields["max_position_embeddings"]), *short]),
        rms_norm_eps=float(fields["rms_norm_eps"]),
        ropes=attention.ropes,
        tie_word_embeddings=bool(fields["tie_word_embeddings"]),
        attention_bias=bias or family.bias is Bias.QKV,
        output_bias=_has_output_bias(family, fields),
        qk_norm=family.qk_norm if family.qk_norm_flag is None or fields[family.qk_norm_flag] else QkNorm.NONE,
        sliding_window=attention.windows,
        rotary_dim=attention.rotary_dim,
        attention_scale=attention.scale,
        eos_token_ids=eos_token_ids,
        experts=experts_config(name, family, fields),
        latent=attention.latent,
        unused_layers=int(fields.get("num_nextn_predict_layers") or 0),
        norms=family.norms,
        norm_offset=family.norm_offset,
        wide_norms=family.wide_norms,
        activation=_clamped(fields) if family.clamped else _activation(fields, family.activation),
        fused=family.fused,
        attention_softcap=_number(fields, family.attention_softcap, None),
        logits_softcap=None if labels else _number(fields, family.logits_softcap, None),
        logits_scale=1.0 if labels else 1.0 / _number(fields, family.logits_divisor, 1.0),
        embedding_scale=_embedding_scale(family, fields),
        residual_scale=_number(fields, family.residual_scale, 1.0),
        labels=labels,
        sinks=family.sinks,
        recurrent=None if family.recurrence is None else recurrent_config(fields, family.recurrence),
        gated_attention=family.gated_attention,
        modules=family.modules,
        feed_forward_layers=_feed_forward_layers(fields),
        gemma=attention.gemma,
        query_scale=_query_scale(family, fields),
        attention_chunk=chunk,
        chunked_layers=chunked,
        rotates_pairs=family.rotates_pairs,
    )


class _Attention(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int  # numbers of a head in the KV pool
    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig, ...]
    rotary_dim: int
    scale: float
    latent: LatentConfig | None
    gemma: GemmaConfig | None


def _attention(family: Family, fields: Mapping[str, Any]) -> _Attention:
    """Return heads, windows, rotation and scale of the attention. Raises: ModelError for invalid values."""
    heads = int(fields["num_attention_heads"])
    kv_heads = int(fields.get("num_key_value_heads") or heads)
    latent = latent_config(fields) if family.latent else None
    if latent is not None:
        kv_heads = 1  # one KV head serves all query heads
    if heads % kv_heads:
        raise ModelError(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    head_dim = int(fields.get("head_dim") or int(fields["hidden_size"]) // heads)
    windows = _windows(family, fields)
    gemma = gemma_config(fields) if family.gemma else None
    if gemma is not None:
        kv_heads, head_dim = pool_shape(gemma.shapes)
    ropes, rotary_dim = _ropes(family, fields, windows, head_dim if latent is None else latent.rope_dim)
    scale = 1.0 if family.gemma else _attention_scale(family, fields, head_dim)
    if latent is not None:
        head_dim, scale = latent.rank + latent.rope_dim, latent_scale(latent, fields["rope_parameters"])
    return _Attention(heads, kv_heads, head_dim, windows, ropes, rotary_dim, scale, latent, gemma)


def _feed_forward_layers(fields: Mapping[str, Any]) -> frozenset[int] | None:
    """Return the layers that only feed forward, if a layer is one part only; None if each layer has both parts."""
    if not fields.get("parts_apart"):
        return None
    return frozenset(index for index, kind in enumerate(fields["layer_types"]) if kind == FEED_FORWARD)


def _labels(fields: Mapping[str, Any]) -> int | None:
    """Return the labels of a classification head, or None. Raises: ModelError for an unsupported head."""
    if model_kind(fields) is not ModelKind.RERANKER:
        return None
    try:
        return len(head_score(fields).token_ids)
    except PoolingRefused as refused:
        raise ModelError(str(refused)) from refused


Default = TypeVar("Default", float, float | None)


def _number(fields: Mapping[str, Any], name: str | None, default: Default) -> float | Default:
    """Return the field `name`, which must be positive; `default` if the family or config.json has no such field."""
    value = None if name is None else fields.get(name)
    if value is None:
        return default
    if not value > 0:
        raise ModelError(f"config.json: {name} {value} must be positive")
    return float(value)


def _check(fields: Mapping[str, Any], name: str, supported: tuple[Any, ...]) -> None:
    value = fields.get(name)
    if value not in supported:
        raise NotInDecoderError(f"config.json: {name} {value!r} is not supported; supported: {supported}")


def _activation(fields: Mapping[str, Any], name: str) -> Activation:
    supported = (Activation.RELU2,) if fields.get("parts_apart") else (Activation.SILU, Activation.GELU)
    _check(fields, name, supported=tuple(each.value for each in supported))
    return Activation(fields[name])


def _clamped(fields: Mapping[str, Any]) -> Activation:
    for name, supported in (("swiglu_limit", SWIGLU_LIMIT), ("swiglu_alpha", SWIGLU_ALPHA)):
        if fields.get(name, supported) != supported:  # transformers ignores both fields and uses the supported values
            raise ModelError(f"config.json: {name} {fields[name]!r} is not supported; supported: {supported}")
    return Activation.CLAMPED


def _has_output_bias(family: Family, fields: Mapping[str, Any]) -> bool:
    name = {Bias.STATED: "attention_bias", Bias.OUTPUT_APART: "attention_out_bias"}.get(family.bias)
    return name is not None and bool(fields.get(name, False))


def _embedding_scale(family: Family, fields: Mapping[str, Any]) -> float:
    if family.scales_embedding_by_root:
        return math.sqrt(fields["hidden_size"])
    return _number(fields, family.embedding_scale, 1.0)


def _attention_scale(family: Family, fields: Mapping[str, Any], head_dim: int) -> float:
    if family.attention_scale is not None:
        return float(fields[family.attention_scale])
    return 1.0 / math.sqrt(head_dim if family.attention_scale_of is None else fields[family.attention_scale_of])


def _inner_size(fields: Mapping[str, Any]) -> int:
    """Return the inner size of dense feed-forward layers, the largest one of a list; without any, that of an expert."""
    names = ("intermediate_size_mlp", "intermediate_size", "moe_intermediate_size")
    size = next(filter(None, (fields.get(name) for name in names)))
    return max(map(int, size)) if isinstance(size, list) else int(size)


def _chunks(family: Family, fields: Mapping[str, Any]) -> tuple[int | None, frozenset[int]]:
    """Return the size of attention chunks in tokens, None without any, and the layers with chunks."""
    if not family.chunked:
        return None, frozenset()
    kinds, layers = fields["layer_types"], int(fields["num_hidden_layers"])
    if len(kinds) != layers or not set(kinds) <= {"full_attention", CHUNKED}:
        raise ModelError(f"config.json: layer_types must name {layers} layers, each one of full_attention, {CHUNKED}")
    chunked = frozenset(index for index, kind in enumerate(kinds) if kind == CHUNKED)
    return (positive_sizes(fields, "attention_chunk_size")[0] if chunked else None), chunked


def _query_scale(family: Family, fields: Mapping[str, Any]) -> QueryScale | None:
    """Return the scale of queries by position, or None. Raises: ModelError for an invalid span."""
    rope, layers = fields["rope_parameters"], range(int(fields["num_hidden_layers"]))
    match family.query_scaling:
        case QueryScaling.YARN if rope.get("llama_4_scaling_beta"):
            strength, (span,) = rope["llama_4_scaling_beta"], positive_sizes(rope, "original_max_position_embeddings")
            return QueryScale(float(strength), span, 0, frozenset(layers))
        case QueryScaling.UNROTATED if fields["attn_temperature_tuning"]:
            unrotated = frozenset(index for index in layers if not fields["no_rope_layers"][index])
            [span] = positive_sizes(fields, "floor_scale")
            return QueryScale(float(fields["attn_scale"]), span, 1, unrotated)
    return None


def _ropes(
    family: Family, fields: Mapping[str, Any], windows: Sequence[int | None], head_dim: int
) -> tuple[tuple[RopeConfig, ...], int]:
    """Return each layer's rotary embedding, which depends on the layer kind, and a head's number of rotated numbers."""
    parameters = fields["rope_parameters"]
    kinds = fields["layer_types"] if "full_attention" in parameters else [None] * len(windows)
    of_kinds = {kind: parameters if kind is None else parameters[kind] for kind in dict.fromkeys(kinds)}
    max_positions = int(fields["max_position_embeddings"])
    ropes = {kind: rope_config(each, max_positions) for kind, each in of_kinds.items()}
    parts = {_rotated_part(family, each) for each in of_kinds.values()}
    rotary_dim = int(head_dim * min(parts))
    if len(parts) > 1 or rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise NotInDecoderError(
            f"config.json: partial_rotary_factor {sorted(parts)} is not supported with head_dim {head_dim}"
        )
    for rope in ropes.values():
        if rope.divisors and len(rope.divisors) != rotary_dim // 2:
            raise ModelError(
                f"config.json: short_factor has {len(rope.divisors)} numbers; it must have {rotary_dim // 2}"
            )
    rotates = _rotates(family, fields, windows)
    none = RopeConfig(RopeKind.NONE)
    return tuple(ropes[kind] if turns else none for kind, turns in zip(kinds, rotates, strict=True)), rotary_dim


def _rotated_part(family: Family, parameters: Mapping[str, Any]) -> float:
    """Return the share of a head's numbers that a table of angles covers. Raises: NotInDecoderError."""
    kind, part = parameters.get("rope_type", RopeKind.DEFAULT.value), parameters.get("partial_rotary_factor")
    if kind == RopeKind.PROPORTIONAL.value:
        return 1.0  # the table has zeros for pairs that do not rotate
    if family.rotates_part or part in (None, 1.0):
        return float(part or 1.0)
    if kind != RopeKind.DEFAULT.value:
        raise NotInDecoderError(f"config.json: partial_rotary_factor {part} is not supported with rope_type {kind!r}")
    return 1.0


def _rotates(family: Family, fields: Mapping[str, Any], windows: Sequence[int | None]) -> list[bool]:
    if family.rotating is Rotating.STATED:
        return [bool(flag) for flag in fields["no_rope_layers"]]
    if family.rotating is Rotating.WINDOWED and fields.get("sliding_window") is not None:
        return [window is not None for window in windows]
    return [True] * len(windows)


def _windows(family: Family, fields: Mapping[str, Any]) -> tuple[int | None, ...]:
    layers = int(fields["num_hidden_layers"])
    window = fields.get("sliding_window")
    if family.windows is Windows.NONE or window is None:
        return (None,) * layers
    if int(window) < 1:
        raise ModelError(f"config.json: sliding_window {window} must be at least 1")
    if family.windows is Windows.ALL:
        return (int(window),) * layers
    kinds = fields["layer_types"]
    if not set(kinds) <= set(LAYER_KINDS) or len(kinds) != layers:
        raise ModelError(f"config.json: layer_types must name {layers} layers, each one of {', '.join(LAYER_KINDS)}")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def stated_fields(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fields as transformers would, or None if only transformers can resolve them."""
    rope = _rope_parameters(raw)
    if rope is None or not _is_complete(raw):
        return None
    fields = {name: value for name, value in raw.items() if name not in ROPE_SPELLINGS}
    if raw["model_type"].startswith("qwen"):
        fields["sliding_window"] = None  # _has_window has checked that use_sliding_window is false
    return {**fields, "rope_parameters": rope}


def _is_complete(raw: Mapping[str, Any]) -> bool:
    return (
        raw.get("model_type") in STATED_FAMILIES
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
    # head_dim defaults to hidden_size / num_attention_heads, except in qwen3.
    return _is_count(head_dim) or (head_dim is None and raw["model_type"] != "qwen3")


def _has_window(raw: Mapping[str, Any]) -> bool:
    if raw["model_type"] == "llama":
        return True
    if raw["model_type"] == "mistral":
        # transformers reads a file with layer_types as model_type 'ministral'.
        stated = "sliding_window" in raw and "layer_types" not in raw
        return stated and (raw["sliding_window"] is None or _is_count(raw["sliding_window"]))
    return raw.get("use_sliding_window") is False


def _has_end(raw: Mapping[str, Any]) -> bool:
    ids = raw.get("eos_token_id")
    return all(type(token_id) is int for token_id in (ids if isinstance(ids, list) else [ids]))


def _rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the rotary parameters of the new or old spelling; None if transformers must resolve them."""
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
