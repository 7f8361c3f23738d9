"""Fields of config.json for GGUF files whose layers are of several kinds: attention, recurrent, feed-forward.

A layer's kind follows from its tensors.
"""

from collections.abc import Mapping
from typing import Any

from baton.text.gguf.header import GgufRefused
from baton.text.gguf.metadata import Fields, GgufMetadata, granite_scales, grouped_experts

ATTENTION, RECURRENT, ROUTER = "attn_q.weight", "ssm_in.weight", "ffn_gate_inp.weight"
PARTS = {RECURRENT: "linear_attention", ATTENTION: "full_attention", ROUTER: "moe", "ffn_up.weight": "mlp"}
"""Tensor by which a layer of Nemotron-H is recognised, and its kind."""


def _kinds(data: GgufMetadata, others: str = "linear_attention") -> list[str]:
    """Return each layer's kind. `others`: kind of the layers without attention."""
    attends = set(data.with_tensor(ATTENTION))
    return ["full_attention" if index in attends else others for index in range(data.block_count)]


def qwen_experts(data: GgufMetadata) -> dict[str, Any]:
    """Return the fields of Qwen's experts."""
    routed = set(data.with_tensor(ROUTER))
    return {
        "num_experts": int(data["expert_count"]),
        "num_experts_per_tok": int(data["expert_used_count"]),
        "moe_intermediate_size": int(data["expert_feed_forward_length"]),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [index for index in range(data.block_count) if index not in routed],
    }


def qwen_hybrid_fields(model_type: str) -> Fields:
    """Return the function of the fields of Qwen3-Next and Qwen3.5."""

    def fields(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
        heads, experts = data.positive("ssm.time_step_rank"), {}
        if data.get("expert_count"):
            shared = int(data["expert_shared_feed_forward_length"])
            experts = {**qwen_experts(data), "shared_expert_intermediate_size": shared}
        return {
            "model_type": model_type,
            "layer_types": _kinds(data),
            "linear_conv_kernel_dim": int(data["ssm.conv_kernel"]),
            "linear_key_head_dim": int(data["ssm.state_size"]),
            "linear_num_key_heads": int(data["ssm.group_count"]),
            "linear_num_value_heads": heads,
            "linear_value_head_dim": int(data["ssm.inner_size"]) // heads,
            **experts,
        }

    return fields


def lfm2_fields(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of LFM2, with or without experts."""
    fields = {
        "model_type": "lfm2",
        "layer_types": _kinds(data, "conv"),
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": int(data["shortconv.l_cache"]),
        "conv_bias": bool(data.with_tensor("shortconv.in_proj.bias")),
        "block_auto_adjust_ff_dim": False,  # the file has the adjusted size
    }
    if not data.get("expert_count"):
        return fields
    return {
        **fields,
        "model_type": "lfm2_moe",
        "num_experts": int(data["expert_count"]),
        "num_experts_per_tok": int(data["expert_used_count"]),
        "moe_intermediate_size": int(data["expert_feed_forward_length"]),
        "num_dense_layers": int(data.get("leading_dense_block_count") or 0),
        "use_expert_bias": bool(data.with_tensor("exp_probs_b.bias")),
        "norm_topk_prob": bool(data.get("expert_weights_norm", True)),
        "routed_scaling_factor": float(data.get("expert_weights_scale") or 1.0),
    }


def granite_moe_fields(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Granite with experts and attention in all layers. Mamba's fields are placeholders."""
    experts = int(data.get("expert_count") or 0)
    shared = f"blk.0.{'ffn_gate_shexp' if experts else 'ffn_gate'}.weight"
    return {
        "model_type": "granitemoehybrid",
        **granite_scales(data, config),
        "layer_types": ["full_attention"] * data.block_count,
        "position_embedding_type": "rope",
        "num_local_experts": experts,
        "num_experts_per_tok": int(data.get("expert_used_count") or 0),
        "shared_intermediate_size": data.rows(shared) if data.has(shared) else 0,
        "mamba_n_heads": 1,
        "mamba_d_head": config["hidden_size"],
        "mamba_expand": 1,
    }


def granite_hybrid_fields(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Granite 4. Bamba, which converters give the same name, is a Granite 4 without scales."""
    heads, inner = data.positive("ssm.time_step_rank"), int(data["ssm.inner_size"])
    return {
        **granite_moe_fields(data, config),
        "layer_types": _kinds(data),
        "position_embedding_type": "rope" if data.get("rope.scaling.finetuned") else "nope",
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_state": int(data["ssm.state_size"]),
        "mamba_n_groups": int(data["ssm.group_count"]),
        "mamba_d_conv": int(data["ssm.conv_kernel"]),
        "mamba_expand": inner // int(config["hidden_size"]),
        "mamba_conv_bias": bool(data.with_tensor("ssm_conv1d.bias")),
        "mamba_proj_bias": bool(data.with_tensor("ssm_in.bias")),
    }


def nemotron_h_fields(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Nemotron-H, each of whose layers is one part. Raises: GgufRefused."""
    if data.get("moe_latent_size"):
        key = f"{data.header.architecture}.moe_latent_size"
        raise GgufRefused(f"{key} is not supported: this file projects the inputs of its experts")
    heads, inner = data.positive("ssm.time_step_rank"), int(data["ssm.inner_size"])
    found = {index: kind for name, kind in reversed(PARTS.items()) for index in data.with_tensor(name)}
    if missing := [index for index in range(data.block_count) if index not in found]:
        raise GgufRefused(f"layer {missing[0]} has none of {', '.join(PARTS)}")
    dense = [index for index, kind in found.items() if kind == "mlp"]
    experts = {}
    if "moe" in found.values():
        shared = int(data["expert_shared_feed_forward_length"])
        experts = {**grouped_experts(data), "moe_shared_expert_intermediate_size": shared}
    return {
        "model_type": "nemotron_h",
        "layers_block_type": [found[index] for index in range(data.block_count)],
        "intermediate_size": data.rows(f"blk.{dense[0]}.ffn_up.weight") if dense else config["intermediate_size"],
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "ssm_state_size": int(data["ssm.state_size"]),
        "n_groups": int(data["ssm.group_count"]),
        "conv_kernel": int(data["ssm.conv_kernel"]),
        "use_conv_bias": bool(data.with_tensor("ssm_conv1d.bias")),
        "use_bias": bool(data.with_tensor("ssm_in.bias")),
        **experts,
    }
