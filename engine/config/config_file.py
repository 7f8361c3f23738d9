"""config.json to the engine's configuration, once and checked. A model that cannot be computed exactly is refused."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from baton.engine.config.decoder_config import DECODER_FAMILIES, NotInDecoderError, decoder_config, stated_fields
from baton.engine.config.model_config import CONFIG_FILE, ModelConfig, ModelError, read_json
from baton.engine.weights.formats import packed_format


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
