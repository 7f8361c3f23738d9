"""Read config.json with transformers: missing fields get their family's defaults, old spellings become new ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, __version__
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from baton.engine.config.families import FAMILIES
from baton.engine.config.limits import check_numbers
from baton.engine.config.model_config import CONFIG_FILE, ModelError, read_json
from baton.text.host.files import reads

ALIASES = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers lacks, and the type whose code computes the same."""

TEXT_ALIASES = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_5_omni_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_omni_moe_text": "qwen3_moe",
    "glm4v_moe_text": "glm4_moe",
}
"""Types of text parts that differ from another type only in the positions of images, and that type."""
READS_PROMPT_BOTH_WAYS = {"paligemma"}
"""Model types whose prompt attends to later tokens, unlike that of their text part."""


@reads(ModelError, CONFIG_FILE)
def read_transformers_config(folder: Path) -> PretrainedConfig:
    """Read the configuration without running code of the checkpoint. Raises: ModelError."""
    path = folder / CONFIG_FILE
    raw = read_json(path)
    check_numbers(path, raw)
    if (known := ALIASES.get(raw.get("model_type", ""))) is not None:
        kept = {name: value for name, value in raw.items() if name not in ("model_type", "auto_map")}
        return CONFIG_MAPPING[known].from_dict(kept)
    if raw.get("model_type") not in CONFIG_MAPPING and (unknown := _around_known_text(raw)) is not None:
        return unknown
    if "auto_map" not in raw and raw.get("model_type") not in CONFIG_MAPPING:
        raise ModelError(f"{path}: model_type {raw.get('model_type')!r} is unknown to transformers {__version__}")
    config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return config


def _around_known_text(raw: Mapping[str, Any]) -> PretrainedConfig | None:
    """Return the configuration of a model that transformers lacks, but whose text part it has; None for others."""
    stated = raw.get("text_config") or raw.get("llm_config")
    if not isinstance(stated, dict):
        return None
    kind = str(stated.get("model_type"))
    kind = ALIASES.get(kind, kind)
    if kind not in CONFIG_MAPPING:
        return None
    text = CONFIG_MAPPING[kind].from_dict(
        {name: value for name, value in stated.items() if name not in ("model_type", "auto_map")}
    )
    outer: Any = PretrainedConfig(
        text_config=text,
        eos_token_id=raw.get("eos_token_id"),
        tie_word_embeddings=raw.get("tie_word_embeddings", text.tie_word_embeddings),
    )
    outer.model_type = str(raw.get("model_type"))
    wrapped: PretrainedConfig = outer
    return wrapped


def text_part(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the language model in a model that also takes images or sound.

    Returns `config` itself if it has no such part, or one of no family that Baton's own decoder computes.
    """
    text = config.get_text_config(decoder=True)
    if text is config or config.is_encoder_decoder or config.model_type in READS_PROMPT_BOTH_WAYS:
        return config
    if not {config.model_type, text.model_type} & _GENERATING:
        return config
    if (known := TEXT_ALIASES.get(text.model_type)) is not None:
        fields = {name: value for name, value in text.to_dict().items() if name != "model_type"}
        rope = fields.get("rope_parameters") or {}
        fields["norm_topk_prob"] = fields.get("norm_topk_prob", True)  # Qwen3-VL has no such field, and normalises
        fields["rope_parameters"] = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
        text = CONFIG_MAPPING[known].from_dict(fields)
    return text if text.model_type in FAMILIES else config


_GENERATING = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() | MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.keys()


def fields_of(config: PretrainedConfig) -> dict[str, Any]:
    """Return all fields by name; `num_local_experts` is the number of experts in every model type."""
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    return {**config.to_dict(), "num_local_experts": experts}


def end_of_text(config: PretrainedConfig) -> Any:
    """Return the id of the end-of-text token, a list of ids, or None.

    A multimodal model's own value takes precedence over that of its text model.
    """
    stated = getattr(config, "eos_token_id", None)
    return getattr(config.get_text_config(decoder=True), "eos_token_id", None) if stated is None else stated
