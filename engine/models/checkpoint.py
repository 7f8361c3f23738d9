"""Where a Hugging Face checkpoint keeps the decoder's tensors. Query, key and value are fused here, and gate and up."""

from typing import Protocol

import torch

from engine.model_config import ModelConfig
from engine.models.decoder import DecoderModel, Layer, Norm
from engine.models.linear import DenseLinear, Linear, LinearSource
from engine.rope import inverse_frequencies


class TensorSource(LinearSource, Protocol):
    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The named tensor in the dtype and on the device to compute with; raises ModelError if absent or misshapen."""


def build_decoder(config: ModelConfig, source: TensorSource, device: torch.device) -> DecoderModel:
    embedding = source.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    layers = tuple(_layer(config, source, index) for index in range(config.num_layers))
    norm = Norm(source.take("model.norm.weight", config.hidden_size), config.rms_norm_eps)
    if config.tie_word_embeddings:
        head: Linear = DenseLinear(embedding)
    else:
        head = source.linear(["lm_head"], [config.vocab_size], config.hidden_size)
    frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)
    return DecoderModel(config, embedding, layers, norm, head, frequencies)


def _layer(config: ModelConfig, source: TensorSource, index: int) -> Layer:
    prefix = f"model.layers.{index}."
    hidden, inner = config.hidden_size, config.intermediate_size
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def norm(name: str, size: int) -> Norm:
        return Norm(source.take(f"{prefix}{name}.weight", size), config.rms_norm_eps)

    return Layer(
        attention_norm=norm("input_layernorm", hidden),
        qkv=source.linear(
            [f"{prefix}self_attn.{name}_proj" for name in "qkv"],
            (query_size, kv_size, kv_size),
            hidden,
            config.attention_bias,
        ),
        query_norm=norm("self_attn.q_norm", config.head_dim) if config.qk_norm else None,
        key_norm=norm("self_attn.k_norm", config.head_dim) if config.qk_norm else None,
        output=source.linear([f"{prefix}self_attn.o_proj"], (hidden,), query_size, config.output_bias),
        feed_forward_norm=norm("post_attention_layernorm", hidden),
        gate_up=source.linear([f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"], (inner, inner), hidden),
        down=source.linear([f"{prefix}mlp.down_proj"], (hidden,), inner),
        window=config.sliding_window[index],
    )
