"""Where a Hugging Face checkpoint keeps the decoder's tensors. Query, key and value are fused here, and gate and up."""

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.model_config import ModelConfig
from engine.models.decoder import DecoderModel, Layer, Linear, Norm
from engine.rope import inverse_frequencies


class TensorSource(Protocol):
    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The named tensor in the dtype and on the device to compute with; raises ModelError if absent or misshapen."""


def build_decoder(config: ModelConfig, source: TensorSource, device: torch.device) -> DecoderModel:
    embedding = source.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    layers = tuple(_layer(config, source, index) for index in range(config.num_layers))
    norm = Norm(source.take("model.norm.weight", config.hidden_size), config.rms_norm_eps)
    if config.tie_word_embeddings:
        head = Linear(embedding)
    else:
        head = Linear(source.take("lm_head.weight", config.vocab_size, config.hidden_size))
    frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)
    return DecoderModel(config, embedding, layers, norm, head, frequencies)


def _layer(config: ModelConfig, source: TensorSource, index: int) -> Layer:
    prefix = f"model.layers.{index}."
    hidden, inner = config.hidden_size, config.intermediate_size
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def norm(name: str, size: int) -> Norm:
        return Norm(source.take(f"{prefix}{name}.weight", size), config.rms_norm_eps)

    def linear(names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool = False) -> Linear:
        """Projections of the same input, stacked into one."""
        pairs = list(zip(names, sizes, strict=True))
        weights = [source.take(f"{prefix}{name}.weight", size, inputs) for name, size in pairs]
        biases = [source.take(f"{prefix}{name}.bias", size) for name, size in pairs] if bias else []
        return Linear(_stack(weights), _stack(biases) if bias else None)

    return Layer(
        attention_norm=norm("input_layernorm", hidden),
        qkv=linear(
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            (query_size, kv_size, kv_size),
            hidden,
            config.attention_bias,
        ),
        query_norm=norm("self_attn.q_norm", config.head_dim) if config.qk_norm else None,
        key_norm=norm("self_attn.k_norm", config.head_dim) if config.qk_norm else None,
        output=linear(("self_attn.o_proj",), (hidden,), query_size, config.output_bias),
        feed_forward_norm=norm("post_attention_layernorm", hidden),
        gate_up=linear(("mlp.gate_proj", "mlp.up_proj"), (inner, inner), hidden),
        down=linear(("mlp.down_proj",), (hidden,), inner),
        window=config.sliding_window[index],
    )


def _stack(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
