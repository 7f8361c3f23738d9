"""The published configurations of large models with latent attention or experts in groups, and what of them is refused.

Kimi-K2's has DeepSeek-V3's fields with other numbers, and a model_type that transformers does not know.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import DecoderConfig, ModelError, QkNorm, RopeKind, read_json
from baton.engine.kv_cache.layout import kv_layout
from baton.kernels.types import GatingFunction

CONFIGS = Path(__file__).resolve().parents[1] / "fixtures/configs"
V2_LITE = read_json(CONFIGS / "deepseek-v2-lite.json")
V3 = read_json(CONFIGS / "deepseek-v3.json")
GLM_AIR = read_json(CONFIGS / "glm-4.5-air.json")
KIMI_K2 = {
    **V3,
    "model_type": "kimi_k2",
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**V3["rope_scaling"], "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}


def read(folder: Path, stated: dict[str, Any], **changes: Any) -> DecoderConfig:
    (folder / "config.json").write_text(json.dumps({**stated, **changes}))
    config = read_model_config(folder)
    assert isinstance(config, DecoderConfig)
    return config


@pytest.mark.parametrize(
    ("stated", "heads", "groups", "scale"),
    [
        (V2_LITE, 16, (1, 1), (1 + 0.0707 * 3.688879454113936) ** 2 / 192**0.5),
        (V3, 128, (8, 4), (1 + 0.1 * 3.688879454113936) ** 2 / 192**0.5),
        (KIMI_K2, 64, (1, 1), (1 + 0.1 * 3.4657359027997265) ** 2 / 192**0.5),
    ],
    ids=["DeepSeek-V2-Lite", "DeepSeek-V3", "Kimi-K2"],
)
def test_token_of_latent_attention_is_one_row_of_576_numbers_for_all_heads(
    stated: dict[str, Any], heads: int, groups: tuple[int, int], scale: float, tmp_path: Path
) -> None:
    config = read(tmp_path, stated)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.value_prefix) == (heads, 1, 576, 512)
    assert config.attention_scale == pytest.approx(scale)
    assert {rope.kind for rope in config.ropes} == {RopeKind.YARN} and config.ropes[0].magnitude == 1.0
    assert config.experts is not None and config.latent is not None and config.latent.interleaved
    routing = config.experts.routing
    assert (routing.groups, routing.kept_groups) == groups
    assert routing.odds is (GatingFunction.SOFTMAX if stated is V2_LITE else GatingFunction.SIGMOID)
    assert min(config.experts.layers) == stated["first_k_dense_replace"]
    assert config.unused_layers == stated.get("num_nextn_predict_layers", 0)
    layout = kv_layout(config, torch.bfloat16, 32)
    assert layout.token_bytes == stated["num_hidden_layers"] * 576 * 2


def test_glm_air_has_heads_of_keys_and_the_experts_of_deepseek(tmp_path: Path) -> None:
    config = read(tmp_path, GLM_AIR)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.rotary_dim) == (96, 8, 128, 64)
    assert (config.attention_bias, config.output_bias, config.qk_norm) == (True, False, QkNorm.NONE)
    assert config.experts is not None and config.experts.shared_size == 1408 and config.latent is None
    assert read(tmp_path, GLM_AIR, use_qk_norm=True).qk_norm is QkNorm.HEADS


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n_group": 7}, "n_group 7 does not make groups of n_routed_experts 256"),
        ({"topk_group": 9}, "topk_group 9 is not in 1 to 8"),
        ({"topk_group": 1, "num_experts_per_tok": 33}, "topk_group 1 groups have fewer than num_experts_per_tok 33"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok 257 is not in 1 to 256"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"kv_lora_rank": 0}, "kv_lora_rank 0 must be a positive integer"),
    ],
)
def test_unsupported_value_is_rejected_by_its_field(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**V3, **changes}))
    with pytest.raises(ModelError, match=named):
        read_model_config(tmp_path)
