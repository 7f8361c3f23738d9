"""A config.json of a common family that states all that our decoder asks for, as nearly every published one does.

Reading it needs nothing of transformers, whose import costs a starting process as much CPU time as that of torch.
A field that is left out, spelled in another way or of another type is not guessed here: transformers resolves it.
"""

from collections.abc import Mapping
from typing import Any

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
