"""Reading config.json: defaults, old spellings, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import ModelError, RopeConfig, RopeKind
from baton.engine.kv_cache.layout import kv_layout
from baton.engine.models.rope import inverse_frequencies

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 7,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return folder


def test_fields_left_out_take_the_family_defaults(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path))
    assert (config.head_dim, config.max_positions, config.rms_norm_eps) == (16, 2048, 1e-6)
    assert config.ropes[0] == RopeConfig(RopeKind.DEFAULT, 10000.0)
    assert config.sliding_window == (None, None, None)
    assert config.eos_token_ids == {7}


@pytest.mark.parametrize(("stated", "end_tokens"), [("[3, 4]", {3, 4}), ("null", {7})])
def test_end_tokens_of_generation_config_replace_those_of_the_model(
    tmp_path: Path, stated: str, end_tokens: set[int]
) -> None:
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {stated}}}')
    assert read_model_config(tmp_path).eos_token_ids == end_tokens


def test_old_and_new_spelling_of_rope_agree(tmp_path: Path) -> None:
    old = read_model_config(write(tmp_path, rope_theta=5e5, rope_scaling=LLAMA3_SCALING))
    new = read_model_config(write(tmp_path, rope_parameters={**LLAMA3_SCALING, "rope_theta": 5e5}))
    assert old.ropes[0] == new.ropes[0] == RopeConfig(RopeKind.LLAMA3, 5e5, 8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    "scaling", [LLAMA3_SCALING, {"rope_type": "linear", "factor": 4.0}, {"rope_type": "dynamic", "factor": 4.0}]
)
def test_scaled_frequencies_equal_transformers(tmp_path: Path, scaling: dict[str, Any]) -> None:
    write(tmp_path, head_dim=64, max_position_embeddings=131072, rope_parameters={**scaling, "rope_theta": 5e5})
    config = read_model_config(tmp_path)
    initialise = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    expected, _ = initialise(AutoConfig.from_pretrained(tmp_path), torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(config.ropes[0], 64), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 40}, (40, 40, 40)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None, None)),
        ({"model_type": "mistral"}, (4096, 4096, 4096)),  # the default of the family
        ({"model_type": "qwen2", "sliding_window": 40}, (None, None, None)),
        (
            {"model_type": "qwen2", "sliding_window": 40, "use_sliding_window": True, "max_window_layers": 1},
            (None, 40, 40),
        ),
        ({"model_type": "llama", "sliding_window": 40}, (None, None, None)),
        (
            {
                "model_type": "mistral",
                "sliding_window": 40,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            (None, 40, None),
        ),
    ],
)
def test_windows_follow_the_family(tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read_model_config(write(tmp_path, **changes)).sliding_window == windows


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": None}, "model_type None"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "factor"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window 0"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok 3"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim.*15"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read_model_config(write(tmp_path, **changes))


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_missing_or_broken_file_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_model_config(tmp_path)


def test_kv_layout_views_storage_block_by_block(tmp_path: Path) -> None:
    layout = kv_layout(read_model_config(write(tmp_path)), torch.bfloat16, block_tokens=8)
    assert layout.token_bytes == 3 * 2 * 2 * 16 * 2
    assert layout.block_bytes == 8 * layout.token_bytes
    storage = torch.zeros(5 * layout.block_bytes + 1, dtype=torch.uint8)
    kv = layout.view(storage, 5).data
    assert kv.shape == (5, 3, 2, 2, 8, 16)
    kv[3] = 1.0
    written = torch.nonzero(storage)[:, 0]
    assert (int(written[0]) // layout.block_bytes, int(written[-1]) // layout.block_bytes) == (3, 3)
    with pytest.raises(ValueError, match="6 blocks"):
        layout.view(storage, 6)
