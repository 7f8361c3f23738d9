"""config.json to what the engine needs to know, once and checked. What cannot be computed exactly is refused.

Defaults of absent fields and old spellings (`rope_theta`, `rope_scaling`) are resolved by transformers.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, __version__

from engine.decoder_config import DECODER_FAMILIES, NotInDecoderError, decoder_config
from engine.model_config import ModelConfig, ModelError, read_json
from engine.quantization.formats import packed_format

CONFIG_FILE = "config.json"


def read_model_config(folder: Path) -> ModelConfig:
    """The configuration of the checkpoint in `folder`: a DecoderConfig where our own decoder computes the model.

    Raises: ModelError for what is missing, and for what neither the decoder nor transformers' code can serve.
    """
    raw = read_json(folder / CONFIG_FILE)
    packed = packed_format(raw)
    config = read_transformers_config(folder)
    eos_token_ids = _eos_token_ids(folder, config)
    if config.model_type in DECODER_FAMILIES:
        with suppress(NotInDecoderError):
            return decoder_config(config, eos_token_ids)
    if packed is not None:
        raise ModelError(f"config.json: quantization_config is supported for {', '.join(DECODER_FAMILIES)} only")
    # transformers' modelling code takes seconds to import, which the decoder's families need not wait for
    from engine.models.transformers_config import transformers_config

    return transformers_config(config, eos_token_ids)


def read_transformers_config(folder: Path) -> PretrainedConfig:
    """As transformers reads it; code that a checkpoint brings along is never run. Raises: ModelError."""
    path = folder / CONFIG_FILE
    raw = read_json(path)
    if "auto_map" not in raw and raw.get("model_type") not in CONFIG_MAPPING:
        raise ModelError(f"{path}: model_type {raw.get('model_type')!r} is none that transformers {__version__} knows")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (StrictDataclassError, ValueError, TypeError, KeyError, OSError) as error:
        raise ModelError(f"{path}: {error}") from error
    return config


def _eos_token_ids(folder: Path, config: PretrainedConfig) -> frozenset[int]:
    ids: Any = getattr(config.get_text_config(decoder=True), "eos_token_id", None)
    path = folder / "generation_config.json"
    if path.exists():
        stated = read_json(path).get("eos_token_id")
        ids = ids if stated is None else stated
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, list) else [ids])
