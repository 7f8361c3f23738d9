"""What can be said of a model from its config.json alone, of any architecture that transformers knows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from engine.model_config import ModelError
from engine.sizing import KvShape


@dataclass(frozen=True, slots=True)
class ModelShape:
    kv: KvShape
    parameters: int
    stated_dtype: torch.dtype | None


def read_model_shape(folder: Path) -> ModelShape:
    """Reads `folder`/config.json; no weights are needed. Raises: ModelError."""
    try:
        config: Any = AutoConfig.from_pretrained(folder)
        text = config.get_text_config()
        heads = int(text.num_attention_heads)
        kv = KvShape(
            num_layers=int(text.num_hidden_layers),
            num_kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
            max_positions=int(text.max_position_embeddings),
        )
        with torch.device("meta"):  # shapes without numbers
            model = AutoModelForCausalLM.from_config(text)
    except (StrictDataclassError, AttributeError, ValueError, TypeError, KeyError, OSError) as error:
        raise ModelError(f"{folder / 'config.json'}: cannot be sized: {error}") from error
    stated = getattr(text, "dtype", None)
    return ModelShape(kv, model.num_parameters(), stated if isinstance(stated, torch.dtype) else None)
