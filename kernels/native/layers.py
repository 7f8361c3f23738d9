"""Layer of a decoder as the native kernels read it: packed weights, and the structs of decoder.h."""

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import torch

from baton.kernels.native.library import experts_struct, gated_struct, pointers, scoring_struct, weight_struct
from baton.kernels.native.structs import DeltaNetStruct, LatentStruct, LayerStruct
from baton.kernels.packed_weight import PackedExperts, PackedGated, PackedWeight
from baton.kernels.types import DeltaRates, HeadNorms, KvPages, Scoring


class LayerNorms(NamedTuple):
    """Norm weights `[hidden]`, None for absent ones: before both parts of a layer, and of what they add."""

    attention: torch.Tensor | None
    feed_forward: torch.Tensor | None
    attention_end: torch.Tensor | None
    feed_forward_end: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """Attention over keys and values of heads; `qkv` computes queries, keys and values."""

    head_norms: HeadNorms | None
    norms_are_whole: bool  # `head_norms`: each of all heads of a token, whose sizes they have
    is_gated: bool  # behind each query is a gate of what that attends to
    scoring: Scoring
    table: int  # of the cosines and sines by which it rotates
    place: int  # of its keys and values among those of a block
    group: int  # of layers, whose blocks these are


@dataclass(frozen=True, slots=True)
class PackedLatent:
    """Multi-head latent attention, as engine/models/latent.py; `qkv` makes queries, or what they are made of, and then
    the row that is kept."""

    query_norm: torch.Tensor | None  # [numbers], with `query_up`
    query_up: PackedWeight | None  # to all queries; None: `qkv` makes them
    norm: torch.Tensor  # [rank]
    to_keys: PackedWeight  # of all heads, each padded to whole panels: nope_dim to rank
    to_values: PackedWeight  # likewise, rank to value_dim
    nope_dim: int
    rope_dim: int
    value_dim: int
    groups: int  # in which heads read the row that they share
    eps: float
    is_interleaved: bool  # numbers that rotate together are side by side
    scoring: Scoring
    table: int  # as of PackedAttention
    place: int
    group: int


@dataclass(frozen=True, slots=True)
class PackedDelta:
    """A gated delta net, as engine/models/delta_net.py; `qkv` makes all that it reads of a token."""

    convolution: torch.Tensor  # [channels, kernel]
    rates: DeltaRates
    norm: torch.Tensor  # [value_dim]
    key_heads: int
    value_heads: int
    key_dim: int
    first_number: int  # of its states in those of a block
    eps: float
    is_interleaved: bool  # a projection has one key head after another, with all that belongs to it


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """Norms, and all that is no packed weight, are float32."""

    norms: LayerNorms
    qkv: PackedWeight
    mixing: PackedAttention | PackedLatent | PackedDelta
    output: PackedWeight
    feed_forward: PackedGated | PackedExperts


def layer_struct(layer: PackedLayer, kv: KvPages) -> LayerStruct:
    """Create the struct of a layer. It keeps the structs alive that it points to, and borrows weights and pages."""
    mixing, feed_forward = layer.mixing, layer.feed_forward
    made = LayerStruct(qkv=weight_struct(layer.qkv), output=weight_struct(layer.output))
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
