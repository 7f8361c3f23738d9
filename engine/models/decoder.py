"""Decoder of Llama and related families: RMS norms, rotary grouped-query attention, gated feed-forward layers.

Families differ only in their configuration (engine/config/families.py). If all layers are packed for the CPU's native
kernels, one call computes them all.
"""

from dataclasses import dataclass, replace

import torch

from baton.engine.config.model_config import DecoderConfig
from baton.engine.kv_cache.groups import LayerPlace
from baton.engine.lora.adapters import without_adapters
from baton.engine.models.attend import attend
from baton.engine.models.batch import Batch, Rope, Rotation
from baton.engine.models.feed_forward import Experts, FeedForward, Gated, Ungated, packed_gated
from baton.engine.models.gemma import GemmaBody
from baton.engine.models.latent import Latent, groups_of
from baton.engine.models.linear import Embedding, Linear, packed_weight
from baton.engine.models.positions import Positions, is_plain, positions_of
from baton.engine.models.residual import Norm, Stream, WholeNorms
from baton.engine.models.states import Recurrent, begin_runs
from baton.kernels.attention import rotated_decode
from baton.kernels.native.decoder import Embedded, NativeDecoder
from baton.kernels.native.layers import (
    LayerNorms,
    PackedAttention,
    PackedLatent,
    PackedLayer,
    PackedMixer,
    PackedRecurrent,
)
from baton.kernels.norms import gate_mul
from baton.kernels.packed_weight import PackedExperts, PackedGated
from baton.kernels.pages import rotate_and_store, store_kv
from baton.kernels.types import Gate, HeadNorms, KvLayer, KvPages, Scoring, StateRuns


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Norm | None
    qkv: Linear | None  # projection to queries, keys and values; None: the layer does not mix tokens
    head_norms: HeadNorms | WholeNorms | None
    latent: Latent | None  # latent attention, whose inputs `qkv` computes; None: plain attention
    output: Linear | None
    attention_end_norm: Norm | None  # norm of attention's output
    feed_forward_norm: Norm | None
    feed_forward: FeedForward | None
    feed_forward_end_norm: Norm | None  # norm of the feed-forward output
    scoring: Scoring
    table: int  # index of the layer's rotation table
    place: LayerPlace
    gated: bool = False  # in `qkv`, each query is followed by a gate of its attention output
    recurrent: Recurrent | None = None  # recurrent layer that replaces attention; None: attention
    scales_queries: bool = False  # whether queries are scaled by position
    is_chunked: bool = False  # whether tokens attend within a chunk of positions


@dataclass(frozen=True, slots=True)
class DecoderModel:
    config: DecoderConfig
    embedding: Embedding
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear  # [vocab, hidden]; shares memory with a tied embedding unless quantised
    rope: Rope
    dtype: torch.dtype  # dtype of weights and activations
    embedding_scale: float = 1.0
    native: NativeDecoder | None = None  # computes all layers in one call, for steps without adapters
    angles: Rotation | None = None  # rotation at every position, which kernels on a GPU look up
    gemma: GemmaBody | None = None  # layers of Gemma 3n and Gemma 4, instead of `layers`

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def hidden(self, batch: Batch, kv: KvPages) -> torch.Tensor:
        """Compute the residual stream after the last layer, `[tokens, hidden]`, and write KV into the pool `kv`.

        All chunks share one set of matrix products; only attention distinguishes sequences.
        """
        native = self.native if batch.adapters is None and self.native is not None and self.native.takes(kv) else None
        if native is not None and is_plain(self.config, batch):
            cos, sin, _ = self.rope.rotation(batch.positions, torch.float32)
            return native.hidden(batch, cos, sin, self._runs(batch, kv), batch.on_layers_start)
        embedded = self.embedded(batch.token_ids).to(self.dtype)
        if self.angles is None:
            angles = self.rope.rotation(batch.positions, self.dtype)
        else:
            angles = self.angles._replace(rows=batch.positions)
        batch.on_layers_start()
        if self.gemma is not None:
            return self.gemma.hidden(embedded, angles, batch, kv)
        stream = Stream(embedded)
        runs, positions = self._runs(batch, kv), positions_of(self.config, batch, kv.block_tokens)
        for layer in self.layers:
            if layer.qkv is not None and layer.output is not None:
                qkv = stream.through(layer.attention_norm, layer.qkv, batch.adapters)
                if layer.recurrent is not None and runs is not None:
                    mixed = layer.recurrent(qkv, kv, runs)
                else:
                    table, pages = angles.table(layer.table), kv.layer(layer.place.place)
                    mixed = self._attention(layer, qkv, table, batch, pages, positions)
                stream.add(mixed, layer.output, batch.adapters, layer.attention_end_norm)
            norm, end_norm, feed_forward = layer.feed_forward_norm, layer.feed_forward_end_norm, layer.feed_forward
            if isinstance(feed_forward, Gated):
                inner = stream.through(norm, feed_forward.gate_up, batch.adapters, gate=feed_forward.gate)
                stream.add(inner, feed_forward.down, batch.adapters, end_norm)
            elif feed_forward is not None:
                stream.add(stream.normal(norm), feed_forward, batch.adapters, end_norm)
        return stream.end()

    def _runs(self, batch: Batch, kv: KvPages) -> StateRuns | None:
        """Return where recurrent layers read and write states, and mark states as written; None without such layers.

        Call it once per step.
        """
        return None if self.config.recurrent is None else begin_runs(batch, kv, self.config.state_numbers)

    def embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the scaled embeddings of tokens, a new `[tokens, hidden]` of any float dtype."""
        rows = self.embedding(token_ids)
        return rows if self.embedding_scale == 1.0 else rows.to(self.dtype) * self.embedding_scale

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return float32 logits `[rows, vocab]` of rows of `hidden()`, or write them to `out` in the model's dtype."""
        if self.native is not None and self.native.head is not None:
            made = self._bounded(self.native.logits(hidden))
            return made if out is None else out.copy_(made)
        made = self._bounded(Stream(hidden.to(self.dtype)).through(self.norm, self.head, out=out))
        return made.float() if out is None else made

    def normal(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return rows of `hidden()` after the last norm, float32 `[rows, hidden]`."""
        return self.norm(hidden.to(self.dtype)).float()

    def _bounded(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale and softcap logits in place, if the model's configuration says so."""
        if self.config.logits_scale != 1.0:
            logits.mul_(self.config.logits_scale)
        if (cap := self.config.logits_softcap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def _attention(
        self, layer: Layer, qkv: torch.Tensor, angles: Rotation, batch: Batch, kv: KvLayer, positions: Positions
    ) -> torch.Tensor:
        """Return attention's output `[tokens, heads * head_dim]` from queries, keys, values, `[tokens, all heads]`."""
        groups = batch.groups if positions.chunked is None or not layer.is_chunked else positions.chunked
        rows = groups[layer.place.group]
        if layer.latent is not None:
            query, key = layer.latent.rows(qkv, angles, batch.adapters)
            store_kv(kv, key, None, rows.slots)
            return layer.latent.values(attend(query, rows, kv.shared_by(groups_of(query.shape[1])), layer.scoring))
        if layer.gated:
            qkv, gate = self._without_gates(qkv)
            attended = self._attention(replace(layer, gated=False), qkv, angles, batch, kv, positions)
            return gate_mul(torch.cat((gate, attended), dim=1), Gate.SIGMOID)
        tokens, norms = len(qkv), layer.head_norms
        if isinstance(norms, WholeNorms):
            qkv, norms = norms(qkv), None
        qkv = qkv.view(tokens, -1, self.config.head_dim)
        if layer.scales_queries and positions.query_scales is not None:
            qkv[:, : self.config.num_heads].mul_(positions.query_scales[:, None, None])
        rotation = (angles.cos, angles.sin, norms, kv, rows.slots, angles.rows)
        if rows.decode is not None and rows.prefills is None and not batch.drafts:
            return rotated_decode(qkv, *rotation, rows.decode, layer.scoring).view(tokens, -1)
        return attend(rotate_and_store(qkv, *rotation), rows, kv, layer.scoring).view(tokens, -1)

    def _without_gates(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split the gates from the queries; return qkv without gates, and the gates."""
        size = self.config.num_heads * self.config.head_dim
        gated, rest = qkv.split((2 * size, qkv.shape[1] - 2 * size), dim=1)
        query, gate = gated.unflatten(1, (self.config.num_heads, 2, -1)).unbind(2)
        return torch.cat((query.flatten(1), rest), dim=1), gate.flatten(1)


def with_native_layers(model: DecoderModel) -> DecoderModel:
    """Return the model, with one native call for all its layers if each of them is packed."""
    if model.gemma is not None:
        return model
    layers = [_packed_layer(layer) for layer in model.layers]
    whole = tuple(layer for layer in layers if layer is not None)
    # The native call supports only one eps for all norms.
    if len(whole) < len(layers) or any(_epsilons(layer) - {model.norm.eps} for layer in model.layers):
        return model
    head, norm = packed_weight(without_adapters(model.head)), model.norm
    # In a shorter dtype the last norm rounds its output; the native norm does not, so it is used only for float32.
    own_head = head if model.dtype == torch.float32 else None
    embedding = Embedded(model.embedding.weight, model.embedding_scale, model.dtype)
    native = NativeDecoder(whole, model.config.num_heads, norm.eps, embedding, norm.weight.float(), own_head)
    return replace(model, native=native)


def _epsilons(layer: Layer) -> set[float]:
    norms = (layer.attention_norm, layer.attention_end_norm, layer.feed_forward_norm, layer.feed_forward_end_norm)
    return {norm.eps for norm in (*norms, layer.head_norms) if norm is not None}


def _packed_layer(layer: Layer) -> PackedLayer | None:
    """Return the layer as native kernels read it; None if one of its weights is not packed."""
    mixer, feed_forward = _packed_mixer(layer), _packed_feed_forward(layer.feed_forward)
    if (mixer is None) != (layer.qkv is None) or (feed_forward is None) != (layer.feed_forward is None):
        return None
    norms = (layer.attention_norm, layer.feed_forward_norm, layer.attention_end_norm, layer.feed_forward_end_norm)
    weights = LayerNorms(*(None if norm is None else norm.weight.float() for norm in norms))
    return PackedLayer(weights, mixer, feed_forward)


def _packed_mixer(layer: Layer) -> PackedMixer | None:
    if layer.qkv is None or layer.output is None:
        return None
    qkv, output = packed_weight(without_adapters(layer.qkv)), packed_weight(without_adapters(layer.output))
    mixing = _packed_mixing(layer)
    return None if qkv is None or output is None or mixing is None else PackedMixer(qkv, mixing, output)


def _packed_mixing(layer: Layer) -> PackedAttention | PackedLatent | PackedRecurrent | None:
    if layer.recurrent is not None:
        return layer.recurrent.packed()
    if layer.latent is not None:
        return layer.latent.packed(layer.scoring, layer.table, layer.place)
    norms, head_norms = layer.head_norms, None
    if norms is not None:
        head_norms = HeadNorms(norms.query.float(), norms.key.float(), norms.eps)
    is_whole = isinstance(norms, WholeNorms)
    group, place = layer.place
    return PackedAttention(head_norms, is_whole, layer.gated, layer.scoring, layer.table, place, group)


def _packed_feed_forward(feed_forward: FeedForward | None) -> PackedGated | PackedExperts | None:
    if isinstance(feed_forward, Gated | Ungated):
        return packed_gated(feed_forward)
    return feed_forward.packed if isinstance(feed_forward, Experts) else None
