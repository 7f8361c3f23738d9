"""Decoder layers for the native kernels: their packed weights, and the structs of decoder.h built from them."""

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import torch

from baton.kernels.native.library import experts_struct, gated_struct, pointers, scoring_struct, weight_struct
from baton.kernels.native.structs import DecoderLayerStruct, DeltaNetStruct, LatentStruct
from baton.kernels.packed_weight import PackedExperts, PackedGated, PackedWeight
from baton.kernels.types import DeltaRates, HeadNorms, KvPages, Scoring


class LayerNorms(NamedTuple):
    """Weights of a layer's norms, each `[hidden]`: before attention and feed-forward, and after them (`_end`)."""

    attention: torch.Tensor | None
    feed_forward: torch.Tensor | None
    attention_end: torch.Tensor | None
    feed_forward_end: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """Attention with keys and values per KV head. The layer's weight `qkv` computes queries, keys and values."""

    head_norms: HeadNorms | None
    norms_are_whole: bool  # whether `head_norms` normalise all heads of a token together
    is_gated: bool  # whether `qkv` also computes a gate for each head's attention output, after its query
    scoring: Scoring
    table: int  # index of the layer's table of cosines and sines
    place: int  # index of the layer's KV in a block
    group: int  # index of the layer group whose blocks it uses


@dataclass(frozen=True, slots=True)
class PackedLatent:
    """Latent attention, see engine/models/latent.py.

    The layer's weight `qkv` computes the queries, or inputs for `query_up`, followed by the row that is stored in the
    pool for each token.
    """

    query_norm: torch.Tensor | None  # [inputs of `query_up`]; None without `query_up`
    query_up: PackedWeight | None  # weight that computes all queries; None: `qkv` computes them
    norm: torch.Tensor  # [rank]
    to_keys: PackedWeight  # weights of all heads, from nope_dim to rank, each padded to complete panels
    to_values: PackedWeight  # weights of all heads, from rank to value_dim, each padded to complete panels
    nope_dim: int
    rope_dim: int
    value_dim: int
    groups: int  # number of groups of heads; the heads of a group read each stored row together
    eps: float
    is_interleaved: bool  # whether the two numbers of a rotated pair are adjacent
    scoring: Scoring
    table: int  # `table`, `place` and `group`: as in PackedAttention
    place: int
    group: int


@dataclass(frozen=True, slots=True)
class PackedDelta:
    """Gated delta net, see engine/models/delta_net.py. The layer's weight `qkv` computes all of its inputs."""

    convolution: torch.Tensor  # [channels, kernel]
    rates: DeltaRates
    norm: torch.Tensor  # [value_dim]
    key_heads: int
    value_heads: int
    key_dim: int
    first_number: int  # offset of the layer's state in a block, in numbers
    eps: float
    is_interleaved: bool  # whether the outputs of `qkv` are grouped by key head


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """Decoder layer with packed weights. All other tensors are float32."""

    norms: LayerNorms
    qkv: PackedWeight
    mixing: PackedAttention | PackedLatent | PackedDelta
    output: PackedWeight
    feed_forward: PackedGated | PackedExperts


def layer_struct(layer: PackedLayer, kv: KvPages) -> DecoderLayerStruct:
    """Build the struct of a layer. The struct keeps nested structs alive, but not the memory of weights and pages."""
    mixing, feed_forward = layer.mixing, layer.feed_forward
    made = DecoderLayerStruct(qkv=weight_struct(layer.qkv), output=weight_struct(layer.output))
    if isinstance(feed_forward, PackedGated):
        made.feed_forward = gated_struct(feed_forward)
    else:
        made.experts = ctypes.pointer(experts_struct(feed_forward))
    made.attention_norm, made.feed_forward_norm, made.attention_end_norm, made.feed_forward_end_norm = pointers(
        layer.norms
    )
    if isinstance(mixing, PackedDelta):
        made.delta = ctypes.pointer(_delta(mixing))
        return made
    pages = kv.layer(mixing.place)
    made.pages, made.scales = pointers((pages.data, pages.scales))
    made.scoring, made.table, made.group = scoring_struct(mixing.scoring), mixing.table, mixing.group
    if isinstance(mixing, PackedLatent):
        made.latent = ctypes.pointer(_latent(mixing))
    elif mixing.head_norms is not None:
        made.query_norm, made.key_norm = pointers((mixing.head_norms.query, mixing.head_norms.key))
        made.norms_are_whole = mixing.norms_are_whole
    made.is_gated = isinstance(mixing, PackedAttention) and mixing.is_gated
    return made


def _latent(latent: PackedLatent) -> LatentStruct:
    up = latent.query_up
    return LatentStruct(
        None if up is None else ctypes.pointer(weight_struct(up)),
        *pointers((latent.query_norm, latent.norm)),
        *(weight_struct(weight) for weight in (latent.to_keys, latent.to_values)),
        *(len(latent.norm), latent.nope_dim, latent.rope_dim, latent.value_dim, latent.groups),
        latent.eps,
        latent.is_interleaved,
    )


def _delta(net: PackedDelta) -> DeltaNetStruct:
    return DeltaNetStruct(
        *pointers((net.convolution, *net.rates, net.norm)),
        *(net.key_heads, net.value_heads, net.key_dim, len(net.norm), net.convolution.shape[1], net.first_number),
        net.eps,
        net.is_interleaved,
    )
