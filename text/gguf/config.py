"""Convert a GGUF file's metadata to the content of config.json, for families that Baton's own decoder computes.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's gguf-py/gguf/constants.py. Values that
llama.cpp derives instead of reading them, such as which layers have a window, are derived here in the same way.
"""

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from baton.text.gguf.header import GgufHeader, GgufRefused, TensorType

LAYER_EMBEDDING = "per_layer_token_embd.weight"
GEMMA3N_SOFTCAP = 30.0  # the converter does not write it
EMBEDDING, HEAD, LONG_FACTORS, SHORT_FACTORS, ROPE_FACTORS = (
    "token_embd.weight",
    "output.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
    "rope_freqs.weight",
)
DEFAULT_ROPE_THETA = 10000.0
LARGEST_GEMMA2_LAYERS, LARGEST_GEMMA3_LAYERS = 46, 62  # layers of the 27B models, which scale attention otherwise
NO_ROPE_EVERY = 4  # in SmolLM3, one layer in four does not rotate
GEMMA3_WINDOWS, EXAONE4_WINDOWS, OLMO3_WINDOWS = 6, 4, 4  # of as many layers, the last one has no window
EXAONE4_LAYERS_WITH_WINDOWS = 64
GATE_SOFTMAX, GATE_SIGMOID = 1, 2  # values of expert_gating_func
LARGEST_FACTOR = 1e30  # divisor of the frequencies of pairs that do not rotate
YARN_LOG_UNIT = 0.1  # yarn_log_multiplier / mscale_all_dim


class GgufMetadata:
    """Metadata of an architecture. Raises GgufRefused for a missing key, and for a value that varies between layers.

    `varies`: whether values may vary between layers; `layers` returns all of them, `get` the first one.
    """

    def __init__(self, header: GgufHeader, varies: bool = False) -> None:
        self.header = header
        self._prefix = header.architecture
        self._varies = varies

    def layers(self, key: str) -> list[Any]:
        """Return the value of each layer."""
        value = self.header.metadata.get(f"{self._prefix}.{key}", self[key])
        return list(value) if isinstance(value, tuple) else [value] * int(self["block_count"])

    def get(self, key: str, default: Any = None) -> Any:
        value = self.header.metadata.get(f"{self._prefix}.{key}", default)
        if isinstance(value, tuple):
            if len(set(value)) != 1 and not (value and self._varies):
                raise GgufRefused(f"{self._prefix}.{key} differs between layers, which is not supported")
            return value[0]
        return value

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise GgufRefused(f"has no {self._prefix}.{key}")
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    def numbers(self, tensor: str) -> list[float]:
        """Return the numbers of a float32 tensor. Raises: GgufRefused if it has another type."""
        described = self.header.tensors[tensor]
        if described.type is not TensorType.F32:
            raise GgufRefused(f"tensor {tensor} is {described.type.name}; supported is F32")
        with described.path.open("rb") as file:
            file.seek(described.start)
            content = file.read(described.stored_bytes)
        return list(struct.unpack(f"<{len(content) // 4}f", content))


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Return the content of config.json, without the ids of special tokens. Raises: GgufRefused."""
    architecture = ARCHITECTURES.get(header.architecture)
    if architecture is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise GgufRefused(f"architecture {header.architecture!r} is not supported; supported are {known}")
    data = GgufMetadata(header, architecture.varies)
    config = _common(data)
    return {**config, **architecture.fields(data, config)}


def _common(data: GgufMetadata) -> dict[str, Any]:
    heads, hidden = int(data["attention.head_count"]), int(data["embedding_length"])
    embedding = data.header.tensors.get(EMBEDDING)
    if embedding is None:
        raise GgufRefused(f"has no tensor {EMBEDDING}")
    head_dim = int(data.get("attention.key_length") or hidden // heads)
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": int(data.get("feed_forward_length") or data["expert_feed_forward_length"]),
        "num_hidden_layers": int(data["block_count"]) - int(data.get("nextn_predict_layers") or 0),
        "num_attention_heads": heads,
        "num_key_value_heads": int(data.get("attention.head_count_kv") or heads),
        "head_dim": head_dim,
        "max_position_embeddings": int(data["context_length"]),
        "rms_norm_eps": shortest(data["attention.layer_norm_rms_epsilon"]),
        "hidden_act": "silu",
        "tie_word_embeddings": not data.has(HEAD),
        "attention_bias": data.has("blk.0.attn_q.bias"),
        "mlp_bias": data.has("blk.0.ffn_up.bias"),
        "rope_parameters": _rope(data, head_dim),
        "dtype": _dtype(data.header),
    }


def shortest(number: float) -> float:
    """Return the decimal number that was stored as this float32: 1e-05 for 9.999999747378752e-06."""
    return float(f"{number:.7g}")


def _dtype(header: GgufHeader) -> str:
    """Return the dtype for computing: that of the projections if they are plain, else bfloat16."""
    kinds = {tensor.type for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return "float32" if kinds == {TensorType.F32} else "bfloat16"


def _rope(data: GgufMetadata, head_dim: int) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(data.get("rope.freq_base") or DEFAULT_ROPE_THETA),
    }
    rotated = int(data.get("rope.dimension_count") or head_dim)
    if rotated != head_dim:
        parameters["partial_rotary_factor"] = rotated / head_dim
    if data.has(ROPE_FACTORS):  # numbers that divide the frequencies, as of Llama 3.1
        factors = data.numbers(ROPE_FACTORS)
        return parameters | _divided(factors, factors, int(data["context_length"]), 1.0)
    if data.has(SHORT_FACTORS):
        original = int(data["rope.scaling.original_context_length"])
        found = _divided(data.numbers(SHORT_FACTORS), data.numbers(LONG_FACTORS), original, None)
        attention = data.get("rope.scaling.attn_factor")
        return parameters | found | ({} if attention is None else {"attention_factor": float(attention)})
    kind = data.get("rope.scaling.type", "none")
    factor = float(data.get("rope.scaling.factor") or 1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return parameters
    if kind == "linear":
        return {**parameters, "rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = int(data["rope.scaling.original_context_length"])
        turns = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attn_factor"}
        stated = {name: data.get(f"rope.scaling.yarn_{key}") for name, key in turns.items()}
        parameters |= {name: shortest(each) for name, each in stated.items() if each is not None}
        return {**parameters, "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise GgufRefused(f"rope.scaling.type {kind!r} is not supported; supported are none, linear and yarn")


def _divided(short: list[float], long: list[float], original: int, attention: float | None) -> dict[str, Any]:
    found = {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
    }
    return found if attention is None else {**found, "attention_factor": attention}


def _windows(layers: int, period: int) -> list[str]:
    """Return the kinds of layers of which the last one of every `period` has no window."""
    return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]


Fields = Callable[[GgufMetadata, Mapping[str, Any]], dict[str, Any]]


def _llama(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    if not data.get("expert_count"):
        return {"model_type": "llama"}
    return {
        "model_type": "mixtral",
        "num_local_experts": int(data["expert_count"]),
        "num_experts_per_tok": int(data["expert_used_count"]),
        "sliding_window": None,
    }


def _mistral3(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    if data.get("attention.temperature_scale"):
        raise GgufRefused("mistral3.attention.temperature_scale is not supported")
    return {"model_type": "mistral", "sliding_window": None}


def _qwen(model_type: str) -> Fields:
    return lambda data, config: {"model_type": model_type, "use_sliding_window": False, "sliding_window": None}


def _qwen3moe(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "num_experts": int(data["expert_count"]),
        "num_experts_per_tok": int(data["expert_used_count"]),
        "moe_intermediate_size": int(data["expert_feed_forward_length"]),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
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
        "layer_types": _windows(layers, 2),
    }


def _gemma3(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": float(data.get("rope.freq_base_swa") or DEFAULT_ROPE_THETA)}
    return {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _gemma_scalar(config, LARGEST_GEMMA3_LAYERS),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": data.get("final_logit_softcapping"),
        "sliding_window": int(data["attention.sliding_window"]),
        "layer_types": _windows(config["num_hidden_layers"], GEMMA3_WINDOWS),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "use_bidirectional_attention": False,
    }


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
        "bos_token_id": None,
        "pad_token_id": None,
    }


def _granite(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    head_scale = 1 / math.sqrt(config["head_dim"])
    return {
        "model_type": "granite",
        "embedding_multiplier": float(data.get("embedding_scale") or 1.0),
        "residual_multiplier": float(data.get("residual_scale") or 1.0),
        "attention_multiplier": float(data.get("attention.scale") or head_scale),
        "logits_scaling": float(data.get("logit_scale") or 1.0),
    }


def _olmo2(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    window = data.get("attention.sliding_window")
    if not window:
        return {"model_type": "olmo2"}
    layer_types = _windows(config["num_hidden_layers"], OLMO3_WINDOWS)
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
        "layer_types": _windows(layers, EXAONE4_WINDOWS) if has_windows else ["full_attention"] * layers,
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
        **_grouped_experts(data),
        "num_nextn_predict_layers": int(data.get("nextn_predict_layers") or 0),
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
    rope = _rope(data, rope_dim)
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
        **_grouped_experts(data),
        "norm_topk_prob": bool(data.get("expert_weights_norm", False)),
    }


def _grouped_experts(data: GgufMetadata) -> dict[str, Any]:
    return {
        "n_routed_experts": int(data["expert_count"]),
        "n_shared_experts": int(data.get("expert_shared_count") or 0),
        "num_experts_per_tok": int(data["expert_used_count"]),
        "moe_intermediate_size": int(data["expert_feed_forward_length"]),
        "first_k_dense_replace": int(data.get("leading_dense_block_count") or 0),
        "n_group": int(data.get("expert_group_count") or 1),
        "topk_group": int(data.get("expert_group_used_count") or 1),
        "norm_topk_prob": bool(data.get("expert_weights_norm", True)),
        "routed_scaling_factor": float(data.get("expert_weights_scale") or 1.0),
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
    if data.get("expert_count"):
        raise GgufRefused("gemma4.expert_count is not supported: this file has experts")
    shared = _shared_kv(data, config)
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
    }


class Architecture(NamedTuple):
    """Architecture of GGUF files. `families`: values of `model_type` that llama.cpp converts to it."""

    fields: Fields  # function that returns the fields of config.json that differ from Llama's
    families: tuple[str, ...]
    varies: bool = False  # whether values may vary between layers


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(_llama, ("llama", "mistral", "mixtral")),
    "mistral3": Architecture(_mistral3, ("mistral",)),
    "qwen2": Architecture(_qwen("qwen2"), ("qwen2",)),
    "qwen3": Architecture(_qwen("qwen3"), ("qwen3",)),
    "qwen3moe": Architecture(_qwen3moe, ("qwen3_moe",)),
    "gemma2": Architecture(_gemma2, ("gemma2",)),
    "gemma3": Architecture(_gemma3, ("gemma3_text",)),
    "phi3": Architecture(_phi3, ("phi3",)),
    "granite": Architecture(_granite, ("granite",)),
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
"""Supported architectures by their names in GGUF files."""
