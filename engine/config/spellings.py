"""Fields of families with names of their own, under the names that the decoder's configuration reads."""

from collections.abc import Callable, Mapping
from typing import Any

from baton.engine.config.model_config import NotInDecoderError

Fields = Mapping[str, Any]


def _lfm2(fields: Fields) -> dict[str, Any]:
    size = int(fields["intermediate_size"])
    if fields.get("block_auto_adjust_ff_dim"):
        size, multiple = int(2 * size / 3), int(fields["block_multiple_of"])
        if fields["block_ffn_dim_multiplier"] is not None:
            size = int(fields["block_ffn_dim_multiplier"] * size)
            size += -size % multiple
    return {"rms_norm_eps": fields["norm_eps"], "hidden_act": "silu", "intermediate_size": size}


def _lfm2_moe(fields: Fields) -> dict[str, Any]:
    return {"rms_norm_eps": fields["norm_eps"], "hidden_act": "silu"}


def _granite_hybrid(fields: Fields) -> dict[str, Any]:
    rotates = fields["position_embedding_type"] == "rope"
    changed = {"mamba_hidden_act": fields["hidden_act"], "no_rope_layers": [rotates] * _layers(fields)}
    if not fields["num_local_experts"]:
        changed["intermediate_size"] = fields["shared_intermediate_size"]
    return changed


def _bamba(fields: Fields) -> dict[str, Any]:
    attends = fields["attn_layer_indices"] or ()
    kinds = ["full_attention" if index in attends else "linear_attention" for index in range(_layers(fields))]
    return {"layer_types": kinds, "mamba_hidden_act": fields["hidden_act"]}


def _nemotron_h(fields: Fields) -> dict[str, Any]:
    if fields["moe_latent_size"] is not None:
        raise NotInDecoderError("config.json: moe_latent_size is not supported; supported: None")
    kinds = fields["layers_block_type"]
    return {
        "num_hidden_layers": len(kinds),
        "no_rope_layers": [0] * len(kinds),
        "layer_types": ["mlp" if kind == "moe" else kind for kind in kinds],
        "parts_apart": True,
        "expert_layers": [index for index, kind in enumerate(kinds) if kind == "moe"],
        "rms_norm_eps": fields["layer_norm_epsilon"],
        "hidden_act": fields["mlp_hidden_act"],
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "shared_expert_intermediate_size": fields["moe_shared_expert_intermediate_size"],
        "mamba_n_groups": fields["n_groups"],
        "mamba_n_heads": fields["mamba_num_heads"],
        "mamba_d_head": fields["mamba_head_dim"],
        "mamba_d_state": fields["ssm_state_size"],
        "mamba_d_conv": fields["conv_kernel"],
        "mamba_conv_bias": fields["use_conv_bias"],
        "mamba_proj_bias": fields["use_bias"],
        # transformers bounds time steps in prompts so, and ignores time_step_limit and time_step_max.
        "time_step_limit": (fields["time_step_min"], float("inf")),
    }


def _gemma4(fields: Fields) -> dict[str, Any]:
    return {"num_experts_per_tok": fields["top_k_experts"]}


def _layers(fields: Fields) -> int:
    return int(fields["num_hidden_layers"])


SPELLINGS: Mapping[str, Callable[[Fields], dict[str, Any]]] = {
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "gemma4_text": _gemma4,
    "granitemoehybrid": _granite_hybrid,
    "bamba": _bamba,
    "nemotron_h": _nemotron_h,
}
"""Function per model type that returns the fields to add or replace."""
