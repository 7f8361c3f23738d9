"""What a config.json states is read without transformers, and is what transformers reads; the rest is left to it."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.engine.config.config_file import decoder_config, stated_fields
from baton.engine.config.resolved_config import fields_of, read_transformers_config

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": [7, 8],
}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
PUBLISHED: dict[str, dict[str, Any]] = {
    "SmolLM2": {"model_type": "llama", "rope_theta": 100000, "rope_scaling": None, "attention_bias": False},
    "Llama 3.1": {
        "model_type": "llama",
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "llama3", **SCALING},
        "mlp_bias": False,
        "pretraining_tp": 1,
        "head_dim": 32,
    },
    "Qwen2.5": {
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "use_sliding_window": False,
        "sliding_window": 32768,
        "max_window_layers": 1,
        "attention_dropout": 0.0,
    },
    "Qwen3": {
        "model_type": "qwen3",
        "rope_theta": 1e6,
        "use_sliding_window": False,
        "sliding_window": None,
        "head_dim": 128,
        "attention_bias": True,
        "rope_scaling": None,
    },
    "Mistral": {"model_type": "mistral", "rope_theta": 1e4, "sliding_window": 40, "head_dim": None},
    "as transformers 5 writes it": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_stated_is_what_transformers_reads(tmp_path: Path, name: str) -> None:
    raw = {**SIZES, **PUBLISHED[name]}
    stated = stated_fields(raw)
    assert stated is not None, "it was left to transformers"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    resolved = fields_of(read_transformers_config(tmp_path))
    ends = frozenset(SIZES["eos_token_id"])
    assert decoder_config(stated, ends) == decoder_config(resolved, ends)


@pytest.mark.parametrize("field", SIZES)
def test_a_field_left_out_is_left_to_transformers(field: str) -> None:
    raw = {**SIZES, **PUBLISHED["SmolLM2"]}
    assert stated_fields({name: value for name, value in raw.items() if name != field}) is None


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("SmolLM2", {"model_type": "gpt2"}),
        ("SmolLM2", {"hidden_size": "wide"}),
        ("SmolLM2", {"num_attention_heads": 5}),
        ("SmolLM2", {"num_key_value_heads": True}),
        ("SmolLM2", {"attention_bias": 1}),
        ("SmolLM2", {"eos_token_id": None}),
        ("SmolLM2", {"auto_map": {}}),
        ("SmolLM2", {"partial_rotary_factor": 0.5}),
        ("SmolLM2", {"rope_theta": None}),
        ("SmolLM2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("SmolLM2", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("SmolLM2", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
        ("Llama 3.1", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}),
        ("Qwen2.5", {"use_sliding_window": True}),
        ("Qwen3", {"head_dim": None}),
        ("Mistral", {"sliding_window": 0}),
        ("Mistral", {"layer_types": ["full_attention"]}),
    ],
)
def test_what_only_transformers_can_resolve_is_left_to_it(name: str, changes: dict[str, Any]) -> None:
    assert stated_fields({**SIZES, **PUBLISHED[name], **changes}) is None
