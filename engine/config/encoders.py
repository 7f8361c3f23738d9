"""Convert an encoder's config.json to the engine's configuration; reject encoders that cannot be computed exactly."""

from pathlib import Path
from typing import Any

from baton.engine.config.model_config import EncoderConfig, ModelError, read_json
from baton.engine.config.resolved_config import fields_of, read_transformers_config
from baton.engine.config.rope import per_sequence_fault
from baton.text.pooler_files import BEHIND_PADDING, read_pooler


def encoder_config(folder: Path) -> EncoderConfig:
    """Read the configuration of an encoder. Raises: ModelError, PoolingRefused."""
    config: Any = read_transformers_config(folder)
    family, fields = str(config.model_type), fields_of(config)
    if fields.get("is_decoder"):
        raise ModelError(f"config.json: is_decoder must be false: model_type {family!r} is served as an encoder")
    if fault := per_sequence_fault(fields.get("rope_parameters")):
        raise ModelError(f"config.json: {fault}")
    pooler = read_pooler(folder)
    padding_id = config.pad_token_id if family in BEHIND_PADDING else None
    return EncoderConfig(
        family=family,
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        intermediate_size=int(config.intermediate_size),
        num_layers=1,
        num_heads=int(config.num_attention_heads),
        num_kv_heads=1,
        head_dim=1,
        max_positions=int(config.max_position_embeddings) - (0 if padding_id is None else padding_id + 1),
        eos_token_ids=frozenset(),
        labels=None if pooler.score is None else len(pooler.score.token_ids),
        text_types=min(int(fields.get("type_vocab_size") or 0), 2 if _tells_types(folder) else 1),
        padding_id=padding_id,
    )


def _tells_types(folder: Path) -> bool:
    """Return whether transformers' tokenizer passes the types of a pair of texts to the model."""
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.exists() else {}
    if names := config.get("model_input_names"):
        return "token_type_ids" in names
    return "Bert" in str(config.get("tokenizer_class") or "BertTokenizer")
