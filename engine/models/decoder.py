"""The decoder of the Llama, Mistral, Qwen2 and Qwen3 line: pre-norm, rotary, grouped-query attention.

The families differ only in data: biases, query and key norms, windows, rotary frequencies, tied embeddings. Where all
its layers are packed for the CPU's native kernels, they are computed in one call.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from baton.engine.config.model_config import DecoderConfig, RopeConfig, RopeKind
from baton.engine.lora.adapters import AdaptedLinear
from baton.engine.models.batch import Batch
from baton.engine.models.feed_forward import FeedForward, Gated
from baton.engine.models.linear import Embedding, Linear, PackedLinear
from baton.engine.models.residual import Norm, Stream
from baton.kernels.attention import paged_decode, paged_prefills, rotated_decode
from baton.kernels.decoder import NativeDecoder, PackedLayer
from baton.kernels.packed_weight import PackedWeight
from baton.kernels.pages import rotate_and_store, store_kv
from baton.kernels.types import HeadNorms, KvLayer, KvPages, Scoring


class Rotation(NamedTuple):
    """Cosine and sine of angles, `[angles, head_dim / 2]` in the model's dtype."""

    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor | None = None  # int64 [tokens], the angles of each token; None: as many angles as tokens


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position, float32 `[head_dim / 2]` (RoFormer, arXiv:2104.09864)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    match rope.kind:
        case RopeKind.DEFAULT:
            return frequencies
        case RopeKind.LINEAR:
            return frequencies / rope.factor
        case RopeKind.LLAMA3:
            return _llama3(rope, frequencies)


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are slowed by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies  # positions
    longest_kept = rope.original_max_positions / rope.high_freq_factor
    shortest_slowed = rope.original_max_positions / rope.low_freq_factor
    smooth = rope.original_max_positions / wavelengths - rope.low_freq_factor
    smooth = smooth / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    slowed = torch.where(wavelengths > shortest_slowed, frequencies / rope.factor, between)
    return torch.where(wavelengths < longest_kept, frequencies, slowed)


def rotation(frequencies: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
    """Angles in float32 for any dtype of the model: bfloat16 cannot distinguish position 256 from 257."""
    angles = positions.to(torch.float32)[:, None] * frequencies[None, :]
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def store_and_attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Batch, kv: KvLayer, scoring: Scoring
) -> torch.Tensor:
    """Writes the keys and values of the batch's tokens into `kv`, then lets them attend; a new tensor like `query`.

    query: `[tokens, heads, head_dim]`; key, value: `[tokens, kv_heads, head_dim]`, rotated where the model rotates.
    """
    store_kv(kv, key, value, batch.slots)
    return attend(query, batch, kv, scoring)


def attend(query: torch.Tensor, batch: Batch, kv: KvLayer, scoring: Scoring) -> torch.Tensor:
    """Of tokens whose keys and values are in `kv` already; a new tensor like `query`, `[tokens, heads, head_dim]`."""
    if (decode := batch.decode) and not batch.prefills:
        return paged_decode(query, kv, decode, scoring)
    query = query.contiguous()
    attended, alone = torch.empty_like(query), 0
    if decode:
        alone = len(decode.context_tokens)
        paged_decode(query[:alone], kv, decode, scoring, attended[:alone])
    if batch.prefills is not None:
        paged_prefills(query[alone:], kv, batch.prefills, scoring, attended[alone:])
    return attended


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Norm
    qkv: Linear  # queries, then keys, then values
    head_norms: HeadNorms | None
    output: Linear
    feed_forward_norm: Norm
    feed_forward: FeedForward
    scoring: Scoring


@dataclass(frozen=True, slots=True)
class DecoderModel:
    config: DecoderConfig
    embedding: Embedding
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear  # [vocab, hidden]; the embedding itself where they are tied, but for a head of integers
    frequencies: torch.Tensor  # float32 [head_dim / 2], of `inverse_frequencies`
    native: NativeDecoder | None = None  # the same in one call, where a CPU has that; it knows nothing of adapters
    angles: Rotation | None = None  # of all positions, where kernels look them up (a GPU): a step computes none

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def hidden(self, batch: Batch, kv: KvPages) -> torch.Tensor:
        """Residual stream after the last layer, `[tokens, hidden]`; writes the KV of these tokens into the pool `kv`.

        All chunks go through one set of matrix products; only attention looks at which sequence a token belongs to.
        """
        if self.native is not None and batch.adapters is None and self.native.takes(kv):
            cos, sin, _ = rotation(self.frequencies, batch.positions, torch.float32)
            return self.native.hidden(batch, cos, sin, batch.meanwhile)
        stream = Stream(self.embedding(batch.token_ids).to(self.dtype))
        if self.angles is None:
            angles = rotation(self.frequencies, batch.positions, self.dtype)
        else:
            angles = self.angles._replace(rows=batch.positions)
        batch.meanwhile()
        for index, layer in enumerate(self.layers):
            qkv = stream.through(layer.attention_norm, layer.qkv, batch.adapters)
            stream.add(self._attention(layer, qkv, angles, batch, kv.layer(index)), layer.output, batch.adapters)
            norm, feed_forward = layer.feed_forward_norm, layer.feed_forward
            if isinstance(feed_forward, Gated):
                inner = stream.through(norm, feed_forward.gate_up, batch.adapters, is_gated=True)
                stream.add(inner, feed_forward.down, batch.adapters)
            else:
                stream.add(stream.normal(norm), feed_forward, batch.adapters)
        return stream.end()

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Float32 `[rows, vocab]` of rows of `hidden()`; or `out`, of the model's dtype, to which they are written."""
        if self.native is not None and self.native.head is not None:
            made = self.native.logits(hidden)
            return made if out is None else out.copy_(made)
        made = Stream(hidden.to(self.dtype)).through(self.norm, self.head, out=out)
        return made.float() if out is None else made

    def _attention(self, layer: Layer, qkv: torch.Tensor, angles: Rotation, batch: Batch, kv: KvLayer) -> torch.Tensor:
        """`[tokens, heads * head_dim]`; qkv: of a token all its heads, those of keys and values last; kv: one layer."""
        tokens = len(qkv)
        qkv = qkv.view(tokens, -1, self.config.head_dim)
        rotation = (angles.cos, angles.sin, layer.head_norms, kv, batch.slots, angles.rows)
        if batch.decode is not None and batch.prefills is None and not batch.drafts:
            return rotated_decode(qkv, *rotation, batch.decode, layer.scoring).view(tokens, -1)
        return attend(rotate_and_store(qkv, *rotation), batch, kv, layer.scoring).view(tokens, -1)


def with_native_layers(model: DecoderModel) -> DecoderModel:
    """The model with its layers in one call, if all of them are packed."""
    layers = [_packed_layer(layer) for layer in model.layers]
    whole = tuple(layer for layer in layers if layer is not None)
    if len(whole) < len(layers):
        return model
    embedding, head = model.embedding.weight, _weight(model.head)
    eps, norm = model.config.rms_norm_eps, model.norm.weight
    # In a shorter dtype the norm rounds to that, which the native one does not.
    own_head = head if norm.dtype == torch.float32 else None
    native = NativeDecoder(whole, model.config.num_heads, eps, embedding, norm.float(), own_head)
    return replace(model, native=native)


def _packed_layer(layer: Layer) -> PackedLayer | None:
    """None where something of it is not packed."""
    feed_forward, norms = layer.feed_forward, None
    if not isinstance(feed_forward, Gated):
        return None
    weights = [_weight(each) for each in (layer.qkv, layer.output, feed_forward.gate_up, feed_forward.down)]
    qkv, output, gate_up, down = weights
    if qkv is None or output is None or gate_up is None or down is None:
        return None
    if layer.head_norms is not None:
        query, key = layer.head_norms.query.float(), layer.head_norms.key.float()
        norms = replace(layer.head_norms, query=query, key=key)
    return PackedLayer(
        attention_norm=layer.attention_norm.weight.float(),
        qkv=qkv,
        head_norms=norms,
        output=output,
        feed_forward_norm=layer.feed_forward_norm.weight.float(),
        gate_up=gate_up,
        down=down,
        scoring=layer.scoring,
    )


def _weight(linear: Linear) -> PackedWeight | None:
    base = linear.base if isinstance(linear, AdaptedLinear) else linear
    return base.weight if isinstance(base, PackedLinear) else None
