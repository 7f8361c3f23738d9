"""Sizes of a model from its config.json alone, for any supported architecture."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import CONFIG_FILE, DecoderConfig, EncoderConfig, ModelConfig, ModelError
from baton.engine.config.resolved_config import read_transformers_config, text_part
from baton.engine.weights.files import TensorShape
from baton.text.host.files import reads


@dataclass(frozen=True, slots=True)
class ModelShape:
    config: ModelConfig
    parameters: int
    tensors: tuple[TensorShape, ...]  # tied tensors occur once


@reads(ModelError, CONFIG_FILE)
def read_model_shape(folder: Path) -> ModelShape:
    """Read `folder`/config.json; no weights are needed. Raises: ModelError."""
    config = read_model_config(folder)
    stated: Any = read_transformers_config(folder)
    if isinstance(config, DecoderConfig):
        stated = text_part(stated)
        stated.tie_word_embeddings = config.tie_word_embeddings
    with torch.device("meta"):  # tensors have shapes, but no data
        model = _class_of(config).from_config(stated)
    tensors = tuple(TensorShape(name, tuple(tensor.shape)) for name, tensor in model.named_parameters())
    return ModelShape(config, model.num_parameters(), tensors)


def _class_of(config: ModelConfig) -> Any:
    """Return the transformers class of the model with the head that Baton serves."""
    if config.makes_answers:
        return AutoModelForCausalLM
    is_headless = isinstance(config, EncoderConfig) and config.labels is None
    return AutoModel if is_headless else AutoModelForSequenceClassification
