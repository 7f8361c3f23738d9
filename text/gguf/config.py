"""Convert a GGUF file's metadata to the content of config.json, for the architectures in ARCHITECTURES: decoders and
encoders.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's gguf-py/gguf/constants.py. Values that
llama.cpp derives instead of reading them, such as which layers have a window, are derived here in the same way.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from baton.text.gguf.encoders import bert_fields, modern_bert_fields, nomic_bert_fields
from baton.text.gguf.header import GgufHeader, GgufRefused
from baton.text.gguf.hybrids import (
    granite_hybrid_fields,
    granite_moe_fields,
    lfm2_fields,
    nemotron_h_fields,
    qwen_experts,
    qwen_hybrid_fields,
)
from baton.text.gguf.metadata import (
    DEFAULT_ROPE_THETA,
    ROPE_FACTORS,
    Fields,
    GgufMetadata,
    granite_scales,
    grouped_experts,
    llama_fields,
    rope_fields,
    shortest,
    windows,
)

MODEL = "model"  # value of general.type
LAYER_EMBEDDING = "per_layer_token_embd.weight"
GEMMA3N_SOFTCAP = 30.0  # the converter does not write it
LARGEST_GEMMA2_LAYERS, LARGEST_GEMMA3_LAYERS = 46, 62  # layers of the 27B models, which scale attention otherwise
NO_ROPE_EVERY = 4  # in SmolLM3 and Llama 4, one layer in four does not rotate
LLAMA4_CHUNK, LLAMA4_SCALE = 8192, 0.1  # tokens of a chunk and of a step of the queries' scale; strength of that scale
MAVERICK_EXPERTS = 128  # the Llama 4 with this number of experts does not normalise queries and keys
GEMMA3_WINDOWS, EXAONE4_WINDOWS, OLMO3_WINDOWS = 6, 4, 4  # of as many layers, the last one has no window
EXAONE4_LAYERS_WITH_WINDOWS = 64
GATE_SOFTMAX, GATE_SIGMOID = 1, 2  # values of expert_gating_func
LARGEST_FACTOR = 1e30  # divisor of the frequencies of pairs that do not rotate
YARN_LOG_UNIT = 0.1  # yarn_log_multiplier / mscale_all_dim


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Return the content of config.json, without the ids of special tokens. Raises: GgufRefused."""
    architecture, kind = ARCHITECTURES.get(header.architecture), header.metadata.get("general.type", MODEL)
    if kind != MODEL:
        raise GgufRefused(
            f"general.type {kind!r} is not supported; supported is {MODEL!r}: give the file of the model itself"
        )
    if architecture is None:
        known, part = ", ".join(sorted(ARCHITECTURES)), LACKING.get(header.architecture)
        reason = f", since the engine has no {part}" if part else ""
        raise GgufRefused(f"architecture {header.architecture!r} is not supported{reason}; supported are {known}")
    data = GgufMetadata(header, architecture.varies)
    fields = {} if architecture.is_encoder else llama_fields(data)
    return {**fields, **architecture.fields(data, fields)}


def _llama(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    if not data.get("expert_count"):
        return {"model_type": "llama"}
    return {
        "model_type": "mixtral",
        "num_local_experts": int(data["expert_count"]),
        "num_experts_per_tok": int(data["expert_used_count"]),
        "sliding_window": None,
    }


def _llama4(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    experts = int(data.get("expert_count") or 0)
    if not experts or data.get("attention.sliding_window") == 0:
        raise GgufRefused("llama4 without experts or without chunks is not supported")
    rotates = [(layer + 1) % NO_ROPE_EVERY != 0 for layer in range(data.block_count)]
    return {
        "model_type": "llama4_text",
        "moe_layers": data.with_tensor("ffn_gate_inp.weight"),
        "num_local_experts": experts,
        "num_experts_per_tok": int(data["expert_used_count"]),
        "intermediate_size": int(data["expert_feed_forward_length"]),
        "intermediate_size_mlp": config["intermediate_size"],
        "no_rope_layers": list(map(int, rotates)),
        "layer_types": ["chunked_attention" if each else "full_attention" for each in rotates],
        "attention_chunk_size": LLAMA4_CHUNK,
        "attn_temperature_tuning": True,
        "floor_scale": LLAMA4_CHUNK,
        "attn_scale": LLAMA4_SCALE,
        "use_qk_norm": experts != MAVERICK_EXPERTS,
    }


def _mistral3(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    rope, scale = dict(config["rope_parameters"]), data.get("attention.temperature_scale")
    if rope["rope_type"] == "yarn" and (logarithm := data.get("rope.scaling.yarn_log_multiplier")):
        rope |= {"mscale": shortest(logarithm), "mscale_all_dim": shortest(logarithm)}
    fields = {"model_type": "mistral", "sliding_window": None, "rope_parameters": rope}
    if not scale:
        return fields
    if rope["rope_type"] != "yarn":
        raise GgufRefused("mistral3.attention.temperature_scale is supported with rope.scaling.type 'yarn' only")
    return {**fields, "model_type": "ministral3", "rope_parameters": {**rope, "llama_4_scaling_beta": shortest(scale)}}


def _qwen(model_type: str) -> Fields:
    return lambda data, config: {"model_type": model_type, "use_sliding_window": False, "sliding_window": None}


def _qwen3moe(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        **qwen_experts(data),
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _gemma2(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    return {
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _gemma_scalar(config, LARGEST_GEMMA2_LAYERS),
        "attn_logit_softcapping": data.get("attn_logit_softcapping"),
        "final_logit_softcapping": data.get("final_logit_softcapping"),
        "sliding_window": int(data["attention.sliding_window"]),
        "layer_types": windows(layers, 2),
    }


def _gemma3(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Gemma 3. Ollama's first files have keys of their own for the bases of rotations."""
    full, base = dict(config["rope_parameters"]), data.get("rope.global.freq_base")
    if base:
        full["rope_theta"] = float(base)
    inner = data.get("rope.freq_base_swa") or data.get("rope.local.freq_base") or DEFAULT_ROPE_THETA
    local = {"rope_type": "default", "rope_theta": float(inner)}
    return {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _gemma_scalar(config, LARGEST_GEMMA3_LAYERS),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": data.get("final_logit_softcapping"),
        "sliding_window": int(data["attention.sliding_window"]),
        "layer_types": windows(config["num_hidden_layers"], GEMMA3_WINDOWS),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "use_bidirectional_attention": False,
    }


def _gemma_embedding(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of EmbeddingGemma. The window is that of config.json: transformers counts both sides."""
    fields = llama_fields(data)
    gemma = {**fields, **_gemma3(data, fields)}
    return {**gemma, "architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True}


def _gemma_scalar(config: Mapping[str, Any], largest_layers: int) -> int:
    if config["num_hidden_layers"] == largest_layers:
        return int(config["hidden_size"]) // int(config["num_attention_heads"])
    return int(config["head_dim"])


def _phi3(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    window = data.get("attention.sliding_window")
    return {
        "model_type": "phi3",
        "sliding_window": int(window) if window else None,
        "original_max_position_embeddings": int(
            data.get("rope.scaling.original_context_length") or data["context_length"]
        ),
        "partial_rotary_factor": config["rope_parameters"].get("partial_rotary_factor", 1.0),
    }


def _granite(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"model_type": "granite", **granite_scales(data, config)}


def _olmo2(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    window = data.get("attention.sliding_window")
    if not window:
        return {"model_type": "olmo2"}
    layer_types = windows(config["num_hidden_layers"], OLMO3_WINDOWS)
    return {"model_type": "olmo3", "sliding_window": int(window), "layer_types": layer_types}


def _smollm3(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    return {
        "model_type": "smollm3",
        "no_rope_layers": [int((layer + 1) % NO_ROPE_EVERY != 0) for layer in range(layers)],
        "layer_types": ["full_attention"] * layers,
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _exaone4(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    has_windows = layers == EXAONE4_LAYERS_WITH_WINDOWS and data.get("attention.sliding_window")
    return {
        "model_type": "exaone4",
        "sliding_window": int(data["attention.sliding_window"]) if has_windows else None,
        "layer_types": windows(layers, EXAONE4_WINDOWS) if has_windows else ["full_attention"] * layers,
    }


def _seed_oss(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "seed_oss",
        "attention_out_bias": data.has("blk.0.attn_output.bias"),
        "mlp_bias": False,
    }


def _glm4moe(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    if data.get("expert_gating_func", GATE_SIGMOID) != GATE_SIGMOID:
        raise GgufRefused("glm4moe.expert_gating_func is not supported; supported is 2")
    return {
        "model_type": "glm4_moe",
        "use_qk_norm": data.has("blk.0.attn_q_norm.weight"),
        **grouped_experts(data),
    }


def _gpt_oss(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    return {
        "model_type": "gpt_oss",
        "num_local_experts": int(data["expert_count"]),
        "num_experts_per_tok": int(data["expert_used_count"]),
        "sliding_window": int(data["attention.sliding_window"]),
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)],
        "rope_parameters": {**config["rope_parameters"], "truncate": False},
    }


def _deepseek2(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    if not data.get("attention.kv_lora_rank") or not data.get("expert_count"):
        raise GgufRefused("deepseek2 without latent attention or without experts is not supported")
    is_corrected = any(name.endswith(".exp_probs_b.bias") for name in data.header.tensors)
    odds = data.get("expert_gating_func") or (GATE_SIGMOID if is_corrected else GATE_SOFTMAX)
    groups = int(data.get("expert_group_count") or 1)
    if odds not in (GATE_SOFTMAX, GATE_SIGMOID) or (odds == GATE_SOFTMAX and data.get("expert_weights_norm")):
        raise GgufRefused(f"deepseek2.expert_gating_func {odds} with these weights of experts is not supported")
    rope_dim = int(data["rope.dimension_count"])
    rope = rope_fields(data, rope_dim)
    if (logarithm := data.get("rope.scaling.yarn_log_multiplier")) and rope["rope_type"] == "yarn":
        scale = shortest(logarithm / YARN_LOG_UNIT)
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    query_rank = data.get("attention.q_lora_rank")
    return {
        "model_type": "deepseek_v3" if odds == GATE_SIGMOID else "deepseek_v2",
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rope_dim,
        "q_lora_rank": None if query_rank is None else int(query_rank),
        "kv_lora_rank": int(data["attention.kv_lora_rank"]),
        "qk_nope_head_dim": int(data.get("attention.key_length_mla") or data["attention.key_length"]) - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": int(data.get("attention.value_length_mla") or data["attention.value_length"]),
        "rope_parameters": rope,
        "topk_method": "greedy" if groups == 1 else "group_limited_greedy",
        **grouped_experts(data),
        "norm_topk_prob": bool(data.get("expert_weights_norm", False)),
    }


def _shared_kv(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that Gemma 3n and Gemma 4 have in common."""
    kinds = [
        "sliding_attention" if each else "full_attention" for each in data.layers("attention.sliding_window_pattern")
    ]
    embedding = data.header.tensors.get(LAYER_EMBEDDING)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": data.get("final_logit_softcapping"),
        "sliding_window": int(data["attention.sliding_window"]),
        "layer_types": kinds,
        "num_kv_shared_layers": int(data.get("attention.shared_kv_layers") or 0),
        "hidden_size_per_layer_input": int(data.get("embedding_length_per_layer_input") or 0),
        "vocab_size_per_layer_input": config["vocab_size"] if embedding is None else embedding.shape[0],
    }


def _gemma3n(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    deviations = data.layers("activation_sparsity_scale")
    local = {"rope_type": "default", "rope_theta": float(data.get("rope.freq_base_swa") or DEFAULT_ROPE_THETA)}
    return {
        "model_type": "gemma3n_text",
        **_shared_kv(data, config),
        "final_logit_softcapping": data.get("final_logit_softcapping", GEMMA3N_SOFTCAP),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "intermediate_size": [int(size) for size in data.layers("feed_forward_length")],
        "altup_num_inputs": int(data["altup.num_inputs"]),
        "altup_active_idx": int(data["altup.active_idx"]),
        "altup_correct_scale": True,
        "laurel_rank": data.header.tensors["blk.0.laurel_l.weight"].shape[0],
        "activation_sparsity_pattern": [
            0.0 if math.isinf(each) else shortest((1 + math.erf(each / math.sqrt(2))) / 2) for each in deviations
        ],
    }


def _gemma4(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    shared, experts = _shared_kv(data, config), int(data.get("expert_count") or 0)
    of_experts = {
        "enable_moe_block": True,
        "num_experts": experts,
        "top_k_experts": int(data.get("expert_used_count") or 0),
        "moe_intermediate_size": int(data.get("expert_feed_forward_length") or 0),
    }
    kinds, kv_heads = shared["layer_types"], data.layers("attention.head_count_kv")
    full, inner = kinds.index("full_attention"), [int(size) for size in data.layers("feed_forward_length")]
    of_full = {"rope_type": "default", "rope_theta": float(data.get("rope.freq_base") or DEFAULT_ROPE_THETA)}
    if data.has(ROPE_FACTORS):  # pairs that do not rotate have a very large divisor
        factors = data.numbers(ROPE_FACTORS)
        rotating = sum(factor == 1.0 for factor in factors)
        if any(factor not in (1.0, factors[-1]) for factor in factors) or factors[-1] < LARGEST_FACTOR / 2:
            raise GgufRefused(f"{ROPE_FACTORS} has other numbers than 1 and {LARGEST_FACTOR}, which is not supported")
        of_full |= {"rope_type": "proportional", "partial_rotary_factor": rotating / len(factors)}
    local = {"rope_type": "default", "rope_theta": float(data.get("rope.freq_base_swa") or DEFAULT_ROPE_THETA)}
    return {
        "model_type": "gemma4_text",
        **shared,
        "rope_parameters": {"full_attention": of_full, "sliding_attention": local},
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "head_dim": int(data["attention.key_length_swa"]),
        "global_head_dim": int(data["attention.key_length"]),
        "num_key_value_heads": int(kv_heads[kinds.index("sliding_attention")]),
        "num_global_key_value_heads": int(kv_heads[full]),
        "attention_k_eq_v": not data.has(f"blk.{full}.attn_v.weight"),
        **(of_experts if experts else {}),
    }


class Architecture(NamedTuple):
    """Architecture of GGUF files. `families`: values of `model_type` that llama.cpp converts to it."""

    fields: Fields
    families: tuple[str, ...]
    varies: bool = False  # whether values may vary between layers
    is_encoder: bool = False


DECODERS: Mapping[str, Architecture] = {
    "llama": Architecture(_llama, ("llama", "mistral", "mixtral")),
    "llama4": Architecture(_llama4, ("llama4_text",)),
    "mistral3": Architecture(_mistral3, ("mistral", "ministral3")),
    "qwen2": Architecture(_qwen("qwen2"), ("qwen2",)),
    "qwen2vl": Architecture(_qwen("qwen2"), ("qwen2",)),
    "qwen3": Architecture(_qwen("qwen3"), ("qwen3",)),
    "qwen3vl": Architecture(_qwen("qwen3"), ("qwen3",)),
    "qwen3moe": Architecture(_qwen3moe, ("qwen3_moe",)),
    "qwen3vlmoe": Architecture(_qwen3moe, ("qwen3_moe",)),
    "qwen3next": Architecture(qwen_hybrid_fields("qwen3_next"), ("qwen3_next",)),
    "qwen35": Architecture(qwen_hybrid_fields("qwen3_5_text"), ("qwen3_5_text",)),
    "qwen35moe": Architecture(qwen_hybrid_fields("qwen3_5_moe_text"), ("qwen3_5_moe_text",)),
    "gemma2": Architecture(_gemma2, ("gemma2",)),
    "gemma3": Architecture(_gemma3, ("gemma3_text",)),
    "phi3": Architecture(_phi3, ("phi3",)),
    "granite": Architecture(_granite, ("granite",)),
    "granitemoe": Architecture(granite_moe_fields, ("granitemoehybrid",)),
    "granitehybrid": Architecture(granite_hybrid_fields, ("granitemoehybrid",), varies=True),
    "nemotron_h": Architecture(nemotron_h_fields, ("nemotron_h",), varies=True),
    "nemotron_h_moe": Architecture(nemotron_h_fields, ("nemotron_h",), varies=True),
    "lfm2": Architecture(lfm2_fields, ("lfm2",), varies=True),
    "lfm2moe": Architecture(lfm2_fields, ("lfm2_moe",), varies=True),
    "olmo2": Architecture(_olmo2, ("olmo2", "olmo3")),
    "smollm3": Architecture(_smollm3, ("smollm3",)),
    "exaone4": Architecture(_exaone4, ("exaone4",)),
    "seed_oss": Architecture(_seed_oss, ("seed_oss",)),
    "glm4moe": Architecture(_glm4moe, ("glm4_moe",)),
    "gpt-oss": Architecture(_gpt_oss, ("gpt_oss",)),
    "deepseek2": Architecture(_deepseek2, ("deepseek_v2", "deepseek_v3")),
    "gemma3n": Architecture(_gemma3n, ("gemma3n_text",), varies=True),
    "gemma4": Architecture(_gemma4, ("gemma4_text",), varies=True),
}
ENCODERS: Mapping[str, Architecture] = {
    "bert": Architecture(bert_fields, ("bert", "roberta", "xlm-roberta"), is_encoder=True),
    "modern-bert": Architecture(modern_bert_fields, ("modernbert",), is_encoder=True),
    "nomic-bert": Architecture(nomic_bert_fields, ("nomic_bert",), is_encoder=True),
    "gemma-embedding": Architecture(_gemma_embedding, ("gemma3_text",), is_encoder=True),
}
LACKING = {"jina-bert-v2": "attention biased by distance (ALiBi)", "nomic-bert-moe": "experts in encoders"}
"""Published architectures of encoders, and the part of each that the engine lacks."""
ARCHITECTURES = {**DECODERS, **ENCODERS}
"""Supported architectures by their names in GGUF files."""
