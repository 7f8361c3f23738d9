"""Read config.json with transformers: missing fields get their family's defaults, old spellings become new ones."""

from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, __version__

from baton.engine.config.limits import check_numbers
from baton.engine.config.model_config import CONFIG_FILE, ModelError, read_json
from baton.text.host.files import reads

ALIASES = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers lacks, and the type whose code computes the same."""


@reads(ModelError, CONFIG_FILE)
def read_transformers_config(folder: Path) -> PretrainedConfig:
    """Read the configuration without running code of the checkpoint. Raises: ModelError."""
    path = folder / CONFIG_FILE
    raw = read_json(path)
    check_numbers(path, raw)
    if (known := ALIASES.get(raw.get("model_type", ""))) is not None:
        kept = {name: value for name, value in raw.items() if name not in ("model_type", "auto_map")}
        return CONFIG_MAPPING[known].from_dict(kept)
    if "auto_map" not in raw and raw.get("model_type") not in CONFIG_MAPPING:
        raise ModelError(f"{path}: model_type {raw.get('model_type')!r} is unknown to transformers {__version__}")
    config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return config


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
