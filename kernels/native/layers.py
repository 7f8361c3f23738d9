"""Decoder layers for the native kernels: their packed weights, and the structs of decoder.h built from them."""

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import torch

from baton.kernels.native.library import experts_struct, gated_struct, pointers, scoring_struct, weight_struct
from baton.kernels.native.structs import (
    DecoderLayerStruct,
    DeltaNetStruct,
    LatentStruct,
    MambaStruct,
    ShortConvolutionStruct,
)
from baton.kernels.packed_weight import PackedExperts, PackedGated, PackedWeight
from baton.kernels.types import DeltaRates, HeadNorms, KvPages, Scoring, StateRates


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
class PackedConvolution:
    """Gated short convolution, see engine/models/short_convolution.py. The layer's weight `qkv` computes its inputs."""

    weight: torch.Tensor  # [channels, kernel]
    bias: torch.Tensor | None  # [channels]
    first_number: int  # offset of the layer's state in a block, in numbers


@dataclass(frozen=True, slots=True)
class PackedMamba:
    """Mamba2 layer, see engine/models/mamba.py. The layer's weight `qkv` computes all of its inputs."""

    convolution: torch.Tensor  # [channels, kernel]
    bias: torch.Tensor | None  # [channels], of the convolution
    rates: StateRates
    norm: torch.Tensor  # [heads * head_dim]
    groups: int
    state_dim: int
    first_number: int  # offset of the layer's state in a block, in numbers
    eps: float


PackedRecurrent = PackedDelta | PackedConvolution | PackedMamba


class PackedMixer(NamedTuple):
    """Part of a layer that mixes tokens."""

    qkv: PackedWeight
    mixing: PackedAttention | PackedLatent | PackedRecurrent
    output: PackedWeight


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """Decoder layer with packed weights. All other tensors are float32."""

    norms: LayerNorms
    mixer: PackedMixer | None  # None: the layer only feeds forward
    feed_forward: PackedGated | PackedExperts | None  # None: the layer only mixes tokens


def layer_struct(layer: PackedLayer, kv: KvPages) -> DecoderLayerStruct:
    """Build the struct of a layer. The struct keeps nested structs alive, but not the memory of weights and pages."""
    made, feed_forward = DecoderLayerStruct(), layer.feed_forward
    if isinstance(feed_forward, PackedGated):
        made.feed_forward = gated_struct(feed_forward)
    elif feed_forward is not None:
        made.experts = ctypes.pointer(experts_struct(feed_forward))
    made.attention_norm, made.feed_forward_norm, made.attention_end_norm, made.feed_forward_end_norm = pointers(
        layer.norms
    )
    if layer.mixer is None:
        return made
    mixing = layer.mixer.mixing
    made.qkv, made.output = weight_struct(layer.mixer.qkv), weight_struct(layer.mixer.output)
    if isinstance(mixing, PackedDelta):
        made.delta = ctypes.pointer(_delta(mixing))
        return made
    if isinstance(mixing, PackedConvolution):
        made.convolution = ctypes.pointer(_convolution(mixing))
        return made
    if isinstance(mixing, PackedMamba):
        made.mamba = ctypes.pointer(_mamba(mixing))
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


def _convolution(layer: PackedConvolution) -> ShortConvolutionStruct:
    return ShortConvolutionStruct(*pointers((layer.weight, layer.bias)), *layer.weight.shape, layer.first_number)


def _mamba(layer: PackedMamba) -> MambaStruct:
    rates, heads = layer.rates, len(layer.rates.rate)
    return MambaStruct(
        *pointers((layer.convolution, layer.bias, rates.rate, rates.bias, rates.skip, layer.norm)),
        *(layer.groups, heads, layer.state_dim, len(layer.norm) // heads, layer.convolution.shape[1]),
        layer.first_number,
        *(rates.least_step, rates.most_step, layer.eps),
    )
