"""config.json as transformers reads it: absent fields take their family's defaults, old spellings become new ones."""

from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, __version__

from baton.engine.config.model_config import CONFIG_FILE, ModelError, read_json

ALIASES = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers does not know, of models that are another's in every part."""


def read_transformers_config(folder: Path) -> PretrainedConfig:
    """Code that a checkpoint brings along is never run. Raises: ModelError."""
    path = folder / CONFIG_FILE
    raw = read_json(path)
    if (known := ALIASES.get(raw.get("model_type", ""))) is not None:
        kept = {name: value for name, value in raw.items() if name not in ("model_type", "auto_map")}
        try:
            return CONFIG_MAPPING[known].from_dict(kept)
        except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
            raise ModelError(f"{path}: {error}") from error
    if "auto_map" not in raw and raw.get("model_type") not in CONFIG_MAPPING:
        raise ModelError(f"{path}: model_type {raw.get('model_type')!r} is none that transformers {__version__} knows")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (StrictDataclassError, ValueError, TypeError, KeyError, OSError) as error:
        raise ModelError(f"{path}: {error}") from error
    return config


def fields_of(config: PretrainedConfig) -> dict[str, Any]:
    """All fields by name; the number of experts under one name for all families."""
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    return {**config.to_dict(), "num_local_experts": experts}


def end_of_text(config: PretrainedConfig) -> Any:
    """A token id, a list of them, or None. Around a text model that of the whole counts, where it is stated."""
    stated = getattr(config, "eos_token_id", None)
    return getattr(config.get_text_config(decoder=True), "eos_token_id", None) if stated is None else stated
