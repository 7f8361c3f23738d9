"""Names and row order of tensors in GGUF files, as llama.cpp's converter, convert_hf_to_gguf.py, writes them."""

import re
from dataclasses import replace

import torch

from baton.engine.config.model_config import DecoderConfig, DeltaConfig

TOP = {
    "model.embed_tokens": ("token_embd",),
    "model.embeddings": ("token_embd",),
    "model.norm": ("output_norm",),
    "model.norm_f": ("output_norm",),
    "model.embedding_norm": ("token_embd_norm", "output_norm"),
    "lm_head": ("output",),
    "score": ("cls.output",),
    "model.embed_tokens_per_layer": ("per_layer_token_embd",),
    "model.per_layer_model_projection": ("per_layer_model_proj",),
    "model.per_layer_projection_norm": ("per_layer_proj_norm",),
}
LAYER = {
    "input_layernorm": ("attn_norm",),
    "operator_norm": ("attn_norm",),
    "norm": ("attn_norm",),
    "ffn_norm": ("ffn_norm",),
    "pre_feedforward_layernorm": ("ffn_norm",),
    "post_feedforward_layernorm": ("post_ffw_norm",),
    "post_feedforward_layernorm_1": ("post_ffw_norm_1",),
    "post_feedforward_layernorm_2": ("post_ffw_norm_2",),
    "pre_feedforward_layernorm_2": ("pre_ffw_norm_2",),
    "router": ("ffn_gate_inp",),
    "router.proj": ("ffn_gate_inp",),
    "post_attention_layernorm": ("post_attention_norm", "ffn_norm"),
    "self_attn.out_proj": ("attn_output",),
    "conv.conv": ("shortconv.conv",),
    "conv.in_proj": ("shortconv.in_proj",),
    "conv.out_proj": ("shortconv.out_proj",),
    "per_layer_input_gate": ("inp_gate",),
    "per_layer_projection": ("proj",),
    "post_per_layer_input_norm": ("post_norm",),
    "laurel.linear_left": ("laurel_l",),
    "laurel.linear_right": ("laurel_r",),
    "laurel.post_laurel_norm": ("laurel_post_norm",),
    "altup.modality_router": ("altup_router",),
    "altup.router_norm": ("altup_router_norm",),
    "altup.prediction_coefs": ("altup_predict_coef",),
    "altup.correction_coefs": ("altup_correct_coef",),
}
"""Names of a layer's modules in GGUF files; the first one that the file has is used."""
PARTS = {
    "q_proj": ("attn_q",),
    "k_proj": ("attn_k",),
    "v_proj": ("attn_v",),
    "qkv_proj": ("attn_qkv",),
    "o_proj": ("attn_output",),
    "q_norm": ("attn_q_norm",),
    "k_norm": ("attn_k_norm",),
    "q_layernorm": ("attn_q_norm",),
    "k_layernorm": ("attn_k_norm",),
    "q_a_proj": ("attn_q_a",),
    "q_b_proj": ("attn_q_b",),
    "q_a_layernorm": ("attn_q_a_norm",),
    "kv_a_proj_with_mqa": ("attn_kv_a_mqa",),
    "kv_a_layernorm": ("attn_kv_a_norm",),
    "kv_b_proj": ("attn_kv_b",),
    "k_b_proj": ("attn_k_b",),
    "v_b_proj": ("attn_v_b",),
    "in_proj_qkv": ("attn_qkv", "ssm_in"),
    "in_proj_z": ("attn_gate", "ssm_in"),
    "in_proj_b": ("ssm_beta", "ssm_ba"),
    "in_proj_a": ("ssm_alpha", "ssm_ba"),
    "in_proj": ("ssm_in",),
    "conv1d": ("ssm_conv1d",),
    "norm": ("ssm_norm",),
    "out_proj": ("ssm_out",),
    "gate_proj": ("ffn_gate",),
    "up_proj": ("ffn_up",),
    "gate_up_proj": ("ffn_up",),
    "down_proj": ("ffn_down",),
    "w1": ("ffn_gate",),
    "w3": ("ffn_up",),
    "w2": ("ffn_down",),
    "gate": ("ffn_gate_inp",),
    "router": ("ffn_gate_inp",),
    "router.layer": ("ffn_gate_inp",),
    "shared_expert_gate": ("ffn_gate_inp_shexp",),
    "output_linear": ("ffn_down",),
}
"""Names in GGUF files of the modules of a layer's parts: of attention, of a recurrent and of a feed-forward layer."""
NUMBERS = {
    "e_score_correction_bias": "exp_probs_b.bias",
    "expert_bias": "exp_probs_b.bias",
    "sinks": "attn_sinks.weight",
    "layer_scalar": "layer_output_scale.weight",
    "correct_output_scale": "altup_correct_scale.weight",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "D": "ssm_d",
    "per_expert_scale": "ffn_down_exps.scale",
}
"""Names in GGUF files of a layer's tensors that are no module's weight or bias."""
STACKED = {"altup_projections": "altup_proj", "altup_unembed_projections": "altup_unembd_proj"}
"""Modules that a GGUF file stacks in one tensor, and its name."""
STACKED_MODULE = re.compile(r"model\.(altup_projections|altup_unembed_projections)\.(\d+)\.weight")
EXPERT = re.compile(r"(?:\w+\.)?experts\.(?P<index>\d+)\.(?P<part>\w+)")
SHARED = re.compile(r"(?:\w+\.shared_experts?|shared_mlp)\.(?P<part>\w+)")
HALVES = {"in_proj_b": 0, "in_proj_a": 1, "gate_proj": 0, "up_proj": 1}
"""Modules of which a tensor in FUSED has two of equal size, and the index of each of them."""
FUSED = {
    "in_proj_qkv": "ssm_in",  # of the first files of Qwen3-Next
    "in_proj_z": "ssm_in",
    "in_proj_b": "ssm_ba",
    "in_proj_a": "ssm_ba",
    "gate_proj": "ffn_gate_up_exps",
    "up_proj": "ffn_gate_up_exps",
}
"""Modules that a tensor of the file may contain with another one, and the name of that tensor."""
SPLIT = {"input_linear": ("gate_proj", "up_proj")}
"""Modules that a GGUF file splits into two."""
UNUSED = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight", "cls.output.weight"}
"""Tensors that are not read as weights, since config.json has the same numbers, or the embedding the same rows."""
PAIRED = (
    *("llama", "llama4", "mistral3", "smollm3", "granite", "granitemoe", "granitehybrid"),
    *("nemotron_h", "nemotron_h_moe"),
)
"""Architectures whose files have the two rows of a rotated pair next to each other."""
PAIRED_MODULES = (".q_proj", ".k_proj")
TILED = ("qwen35", "qwen35moe")
"""Architectures whose value heads are ordered first by their index in a key head's group, then by key head."""


def gguf_names(name: str) -> tuple[str, ...]:
    """Return the possible GGUF names of a tensor: `blk.3.ffn_up.weight` for `model.layers.3.mlp.up_proj.weight`."""
    module, _, kind = name.rpartition(".")
    if (stacked := STACKED_MODULE.fullmatch(name)) is not None:
        return (f"{STACKED[stacked[1]]}.{kind}",)
    if module in TOP:
        return tuple(f"{each}.{kind}" for each in TOP[module])
    _, _, rest = module.partition("model.layers.")
    layer, _, part = rest.partition(".")
    if kind in NUMBERS:
        return (f"blk.{layer}.{NUMBERS[kind]}",)
    return tuple(f"blk.{layer}.{each}.{kind}" for each in _modules(part))


def _modules(part: str) -> tuple[str, ...]:
    """Return the possible names of a module within a layer."""
    if part in LAYER:
        return LAYER[part]
    if (expert := EXPERT.fullmatch(part)) is not None:
        names = tuple(f"{each}_exps" for each in PARTS.get(expert["part"], ()))
        return (*names, "ffn_gate_up_exps") if expert["part"] in HALVES else names
    if (shared := SHARED.fullmatch(part)) is not None:
        names = PARTS.get(shared["part"], ())
        return (*(f"{each}_shexp" for each in names), *names)
    return PARTS.get(part.partition(".")[2], ())


def expert_of(name: str) -> int | None:
    """Return the index of a tensor in the GGUF tensor that stacks those of all experts, or of all streams, if any."""
    if (found := STACKED_MODULE.fullmatch(name)) is not None:
        return int(found[2])
    found = EXPERT.search(name)
    return None if found is None else int(found["index"])


def is_fused(name: str, stored: str) -> bool:
    """Return whether the tensor `stored` of a GGUF file contains another module besides that of `name`."""
    return f".{FUSED.get(_end(name))}." in stored


def fused_rows(name: str, rows: int, config: DecoderConfig) -> int:
    """Return the rows of the tensor that contains the module of `name`, which has `rows`, and another one."""
    if isinstance(config.recurrent, DeltaConfig) and FUSED[_end(name)] == "ssm_in":
        return config.recurrent.channels + config.recurrent.value_size
    return 2 * rows


def _end(name: str) -> str:
    """Return the last part of a module's name."""
    return name.removesuffix(".weight").rpartition(".")[2]


def apart(config: DecoderConfig) -> DecoderConfig:
    """Return the configuration with one module per projection of a delta net, as GGUF files store them."""
    if not isinstance(config.recurrent, DeltaConfig):
        return config
    return replace(config, recurrent=replace(config.recurrent, interleaved=False))


def is_paired(architecture: str, name: str) -> bool:
    """Return whether the file has the two rows of each rotated pair next to each other."""
    return architecture in PAIRED and name.rpartition(".")[0].endswith(PAIRED_MODULES)


def stored_rows(architecture: str, name: str, stored: str, rows: int, config: DecoderConfig) -> torch.Tensor | None:
    """Return the index in the file of each row of a tensor in Hugging Face's order; None if both are the same.

    `stored`: its name in the file, where it has `rows` rows.
    """
    if is_paired(architecture, name):
        return torch.arange(rows).view(-1, config.head_dim // 2, 2).transpose(1, 2).flatten()
    if isinstance(config.recurrent, DeltaConfig) and ".linear_attn." in name:
        return _delta_rows(architecture, _end(name), stored, rows, config.recurrent)
    return torch.arange(rows).view(2, -1)[HALVES[_end(name)]] if is_fused(name, stored) else None


def _delta_rows(architecture: str, end: str, stored: str, rows: int, delta: DeltaConfig) -> torch.Tensor | None:
    """Return the index in the file of each row of a delta net's module, of whose name `end` is the last part."""
    if ".ssm_ba." in stored:
        return torch.arange(rows).view(delta.key_heads, 2, -1)[:, HALVES[end]].flatten()
    if ".ssm_in." in stored:
        values = delta.value_size // delta.key_heads
        of_key_heads = torch.arange(rows).view(delta.key_heads, -1)
        *mixed, gates = of_key_heads.split((delta.key_dim, delta.key_dim, values, values), dim=1)
        return gates.flatten() if end == "in_proj_z" else torch.cat([part.flatten() for part in mixed])
    if architecture not in TILED:
        return None
    if end in ("in_proj_qkv", "conv1d"):
        keys = 2 * delta.key_heads * delta.key_dim
        return torch.cat((torch.arange(keys), keys + tiled_heads(delta, delta.value_dim)))
    if end in ("in_proj_z", "in_proj_b", "in_proj_a", "A_log", "dt_bias"):
        return tiled_heads(delta, rows // delta.value_heads)
    return None


def stored_columns(architecture: str, name: str, config: DecoderConfig) -> torch.Tensor | None:
    """Return the index of the input that each column of a tensor of the file belongs to; None if they are in order."""
    delta = config.recurrent
    if architecture not in TILED or not isinstance(delta, DeltaConfig) or delta.value_heads == delta.key_heads:
        return None
    return tiled_heads(delta, delta.value_dim).argsort() if name.endswith(".linear_attn.out_proj.weight") else None


def tiled_heads(delta: DeltaConfig, size: int) -> torch.Tensor:
    """Return the index in the file of each number of all value heads, which have `size` numbers each."""
    together = delta.value_heads // delta.key_heads
    return torch.arange(delta.value_heads * size).view(together, delta.key_heads, size).transpose(0, 1).flatten()
