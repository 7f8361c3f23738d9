"""Where a Hugging Face checkpoint keeps the decoder's tensors. Query, key and value are fused here, and gate and up."""

from typing import NamedTuple, Protocol

import torch

from baton.engine.config.model_config import DecoderConfig
from baton.engine.models.decoder import DecoderModel, Layer, Norm, inverse_frequencies
from baton.engine.models.feed_forward import Experts, FeedForward, Gated, stacked
from baton.engine.models.linear import DenseEmbedding, DenseLinear, Embedding, Linear, LinearSource
from baton.engine.weights.on_kernels import has_kernels
from baton.kernels.pages import HeadNorms
from baton.kernels.types import Scoring


class GatedNames(NamedTuple):
    gate: str
    up: str
    down: str


DENSE_NAMES = GatedNames("gate_proj", "up_proj", "down_proj")
MIXTRAL_NAMES = GatedNames("w1", "w3", "w2")


class TensorSource(LinearSource, Protocol):
    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The named tensor in the dtype and on the device to compute with; raises ModelError if absent or misshapen."""


class Ends(NamedTuple):
    """The embedding of tokens, and the head that makes logits."""

    embedding: Embedding
    head: Linear


def take_embedding(config: DecoderConfig, source: TensorSource) -> torch.Tensor:
    return source.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)


def take_head(config: DecoderConfig, source: TensorSource) -> Linear:
    """Of a model in which it is not tied to the embedding."""
    return source.linear(["lm_head"], [config.vocab_size], config.hidden_size)


def read_ends(config: DecoderConfig, source: TensorSource, head_rows: range | None = None) -> Ends:
    """`head_rows`: those of a tied head that are wanted, if not all; another head the source has cut."""
    embedding = take_embedding(config, source)
    if not config.tie_word_embeddings:
        return Ends(DenseEmbedding(embedding), take_head(config, source))
    return Ends(DenseEmbedding(embedding), DenseLinear(rows_of(embedding, head_rows)))


def rows_of(weight: torch.Tensor, wanted: range | None) -> torch.Tensor:
    return weight if wanted is None else weight[wanted.start : wanted.stop]


def build_decoder(
    config: DecoderConfig, source: TensorSource, device: torch.device, ends: Ends | None = None
) -> DecoderModel:
    """`ends`: where they have been read from `source` already."""
    embedding, head = ends or read_ends(config, source)
    layers = tuple(_layer(config, source, index, has_kernels(device)) for index in range(config.num_layers))
    norm = Norm(source.take("model.norm.weight", config.hidden_size), config.rms_norm_eps)
    frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)
    return DecoderModel(config, embedding, layers, norm, head, frequencies)


def _layer(config: DecoderConfig, source: TensorSource, index: int, stacks: bool) -> Layer:
    """`stacks`: experts lie together, for a kernel."""
    prefix = f"model.layers.{index}."
    hidden = config.hidden_size
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
        head_norms=_head_norms(config, source, prefix) if config.qk_norm else None,
        output=source.linear([f"{prefix}self_attn.o_proj"], (hidden,), query_size, config.output_bias),
        feed_forward_norm=norm("post_attention_layernorm", hidden),
        feed_forward=_feed_forward(config, source, index, stacks),
        scoring=Scoring(config.head_dim**-0.5, config.sliding_window[index]),
    )


def _head_norms(config: DecoderConfig, source: TensorSource, prefix: str) -> HeadNorms:
    query, key = (source.take(f"{prefix}self_attn.{name}_norm.weight", config.head_dim) for name in "qk")
    return HeadNorms(query, key, config.rms_norm_eps)


def _feed_forward(config: DecoderConfig, source: TensorSource, index: int, stacks: bool) -> FeedForward:
    prefix = f"model.layers.{index}."
    experts = config.experts
    if experts is None or index not in experts.layers:
        return _gated(source, f"{prefix}mlp.", DENSE_NAMES, config.hidden_size, config.intermediate_size)
    prefix, names = (
        (f"{prefix}block_sparse_moe.", MIXTRAL_NAMES) if config.family == "mixtral" else (f"{prefix}mlp.", DENSE_NAMES)
    )
    apart = Experts(
        router=source.take(f"{prefix}gate.weight", experts.count, config.hidden_size),
        experts=tuple(
            _gated(source, f"{prefix}experts.{number}.", names, config.hidden_size, experts.inner_size)
            for number in range(experts.count)
        ),
        per_token=experts.per_token,
        normalised=experts.normalised,
    )
    return stacked(apart) if stacks else apart


def _gated(source: TensorSource, prefix: str, names: GatedNames, hidden: int, inner: int) -> Gated:
    return Gated(
        gate_up=source.linear([prefix + names.gate, prefix + names.up], (inner, inner), hidden),
        down=source.linear([prefix + names.down], (hidden,), inner),
    )
