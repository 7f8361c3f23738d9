"""The engine's configuration of a model. engine/config/config_file.py reads it."""

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"


class ModelError(Exception):
    """This checkpoint cannot be served; the message names the file, field or tensor, and the supported values."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Of any architecture: the size of its KV and the bounds of its requests."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the feed-forward layers
    num_layers: int
    num_heads: int
    num_kv_heads: int  # heads of keys and values as they are stored
    head_dim: int  # of keys, and of values as they are stored
    max_positions: int
    eos_token_ids: frozenset[int]


class RopeKind(Enum):
    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. The last four fields mean something for LLAMA3 only, `factor` for LINEAR too."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in place of the feed-forward layer."""

    layers: frozenset[int]  # that have experts; the others are dense
    count: int
    per_token: int
    inner_size: int  # of each
    normalised: bool  # whether the weights of a token's experts are scaled to sum to 1


@dataclass(frozen=True, slots=True)
class DecoderConfig(ModelConfig):
    """Of the families that engine/models/decoder.py computes itself."""

    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool  # of the query, key and value projections
    output_bias: bool  # of attention's output projection
    qk_norm: bool  # RMSNorm over head_dim on queries and keys, before rotation
    sliding_window: tuple[int | None, ...]  # per layer: tokens a query sees, itself included; None sees all
    experts: ExpertsConfig | None = None


def read_json(path: Path) -> dict[str, Any]:
    """Raises: ModelError for a file that is not there or no JSON object."""
    try:
        loaded = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{path}: not a JSON object")
    return loaded
