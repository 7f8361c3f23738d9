"""Layers of Gemma 3n and Gemma 4: normalised values, layers that share keys and values, token embeddings per layer.

Gemma 3n also has several residual streams (AltUp, arXiv:2301.13310), learned residual connections (LAuReL,
arXiv:2411.07501) and feed-forward layers with sparse gates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.engine.config.model_config import AltUpConfig, HeadShape
from baton.engine.kv_cache.groups import LayerPlace
from baton.engine.models.attend import attend
from baton.engine.models.batch import AdapterRows, Batch, Rotation
from baton.engine.models.feed_forward import Experts, FeedForward
from baton.engine.models.linear import Embedding, Linear
from baton.engine.models.residual import Norm
from baton.kernels.norms import gate_mul, rms_norm, rotary
from baton.kernels.pages import rotate_and_store
from baton.kernels.types import ExpertChoice, Gate, HeadNorms, KvPages, Scoring

HALF_ROOT = math.sqrt(0.5)
LEAST_MAGNITUDE = 1e-5  # bound of the mean square by which a stream is divided


@dataclass(frozen=True, slots=True)
class GemmaAttention:
    """Attention of a layer that stores its keys and values, or that reads those of another layer."""

    qkv: Linear  # queries; keys and values too in a layer that stores them, unless the keys are the values
    query_norm: torch.Tensor  # [head_dim]
    key_norm: torch.Tensor | None  # [head_dim]; None: the layer reads keys and values of another layer
    value_norm: torch.Tensor  # [head_dim], ones
    keys_as_values: bool
    output: Linear
    heads: int
    shape: HeadShape
    eps: float
    scoring: Scoring
    table: int  # index of the layer's rotation table
    place: LayerPlace  # index of the keys and values that it reads

    def __call__(self, x: torch.Tensor, angles: Sequence[Rotation], batch: Batch, kv: KvPages) -> torch.Tensor:
        rows, pages = batch.groups[self.place.group], kv.layer_shaped(self.place.place, *self.shape)
        cos, sin, _ = angles[self.table]
        qkv = self.qkv(x, batch.adapters).view(len(x), -1, self.shape.head_dim)
        if self.key_norm is None:
            query = rotary(rms_norm(qkv, self.query_norm, self.eps), cos, sin)
        else:
            norms = HeadNorms(self.query_norm, self.key_norm, self.eps)
            query = rotate_and_store(self._with_values(qkv), cos, sin, norms, pages, rows.slots)
        attended = attend(query, rows, pages, self.scoring).view(len(x), -1)
        return self.output(attended, batch.adapters)

    def _with_values(self, qkv: torch.Tensor) -> torch.Tensor:
        """Return queries, keys and normalised values."""
        values = rms_norm(qkv[:, -self.shape.kv_heads :].contiguous(), self.value_norm, self.eps)
        others = qkv if self.keys_as_values else qkv[:, : -self.shape.kv_heads]
        return torch.cat((others, values), dim=1)


@dataclass(frozen=True, slots=True)
class SparseGated:
    """Gated feed-forward layer that keeps the gates above a bound, and subtracts the bound from them.

    The bound is `deviations` standard deviations above the mean of a token's gates.
    """

    gate_up: Linear
    down: Linear
    deviations: float

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        gates, factors = self.gate_up(x, adapters).chunk(2, dim=-1)
        bound = gates.mean(-1, keepdim=True) + gates.std(-1, keepdim=True, unbiased=False) * self.deviations
        kept = torch.relu(gates - bound)
        return self.down(gate_mul(torch.cat((kept, factors), dim=-1), Gate.GELU), adapters)


def deviations_of(share: float) -> float:
    """Return how many standard deviations above its mean a normal distribution has exceeded `share` of its weight."""
    return float(torch.erfinv(torch.tensor(2 * share - 1)) * math.sqrt(2))


@dataclass(frozen=True, slots=True)
class LayerInput:
    """Addition of the layer's own embedding of a token, filtered by a gate, to the residual stream."""

    gate: Linear
    projection: Linear
    norm: Norm

    def __call__(self, x: torch.Tensor, embedding: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor:
        gated = gate_mul(torch.cat((self.gate(x, adapters), embedding), dim=-1), Gate.GELU)
        return self.norm(self.projection(gated, adapters))


@dataclass(frozen=True, slots=True)
class LayerEmbeddings:
    """Embeddings of tokens for all layers: from a table, and projected from the model's embedding."""

    table: Embedding  # [vocabulary, layers * size]
    vocabulary: int
    size: int
    projection: Linear
    norm: Norm  # of `size` numbers

    def __call__(self, token_ids: torch.Tensor, x: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor:
        """Return the embeddings, `[layers, tokens, size]`. `x`: embeddings of the model, `[tokens, hidden]`."""
        projected = self.projection(x, adapters) * x.shape[1] ** -0.5
        own = self.table(torch.where(token_ids < self.vocabulary, token_ids, 0)).to(x.dtype) * math.sqrt(self.size)
        made = (self.norm(projected.view(len(x), -1, self.size)) + own.view(len(x), -1, self.size)) * HALF_ROOT
        return made.transpose(0, 1).contiguous()


@dataclass(frozen=True, slots=True)
class Laurel:
    """Learned residual connection of low rank around attention."""

    left: Linear
    right: Linear
    norm: Norm

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor:
        return x + self.norm(self.right(self.left(x, adapters), adapters))


@dataclass(frozen=True, slots=True)
class AltUp:
    """Alternating updates: predict all streams, and correct the predictions by the computed one."""

    sizes: AltUpConfig
    norm: Norm
    router: Linear
    prediction: Linear
    correction: Linear
    output_scale: torch.Tensor | None  # [hidden]

    def predicted(self, streams: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor:
        """Return the predicted streams, `[streams, tokens, hidden]`."""
        count = self.sizes.streams
        weights = self.prediction(self._modes(streams[self.sizes.active], adapters), adapters).view(-1, count, count)
        return torch.einsum("ith,tji->jth", streams, weights) + streams

    def corrected(self, predicted: torch.Tensor, computed: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor:
        """Return the corrected streams. `computed`: the active stream after the layer, `[tokens, hidden]`."""
        weights = self.correction(self._modes(computed, adapters), adapters) + 1.0
        return predicted + (computed - predicted[self.sizes.active]) * weights.T[:, :, None]

    def _modes(self, x: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor:
        return torch.tanh(self.router(self.norm(x) / x.shape[1], adapters).float()).to(x.dtype)


@dataclass(frozen=True, slots=True)
class ExpertsBeside:
    """Mixture of experts in addition to the dense feed-forward layer, whose output is normalised first.

    Router and experts read the residual stream, each behind a norm of its own.
    """

    dense_norm: Norm
    router_norm: Norm
    norm: Norm
    experts: Experts
    scales: torch.Tensor  # [experts], factors of the experts' weights
    end_norm: Norm

    def __call__(self, x: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """Return the sum of both parts. `x`: residual stream; `dense`: output of the dense layer."""
        weights, chosen = self.experts.router(self.router_norm(x))
        choice = ExpertChoice(weights * self.scales[chosen], chosen)
        return self.dense_norm(dense) + self.end_norm(self.experts.mixed(self.norm(x), choice))


@dataclass(frozen=True, slots=True)
class GemmaLayer:
    attention_norm: Norm
    attention: GemmaAttention
    attention_end_norm: Norm
    feed_forward_norm: Norm
    feed_forward: FeedForward
    feed_forward_end_norm: Norm
    experts: ExpertsBeside | None = None
    input: LayerInput | None = None
    scale: float = 1.0
    laurel: Laurel | None = None
    altup: AltUp | None = None

    def computed(self, x: torch.Tensor, angles: Sequence[Rotation], batch: Batch, kv: KvPages) -> torch.Tensor:
        """Return one residual stream after attention and feed-forward layer, `[tokens, hidden]`."""
        normal = self.attention_norm(x)
        x = x + self.attention_end_norm(self.attention(normal, angles, batch, kv))
        if self.laurel is not None:
            x = (x + self.laurel(normal, batch.adapters)) / math.sqrt(2)
        made = self.feed_forward(self.feed_forward_norm(x), batch.adapters)
        return x + self.feed_forward_end_norm(made if self.experts is None else self.experts(x, made))

    def __call__(
        self,
        streams: torch.Tensor,
        embedding: torch.Tensor | None,
        angles: Sequence[Rotation],
        batch: Batch,
        kv: KvPages,
    ) -> torch.Tensor:
        """Return the residual streams after the layer, `[streams, tokens, hidden]`."""
        if self.altup is None:
            [x] = streams
            x = self.computed(x, angles, batch, kv)
            if self.input is not None and embedding is not None:
                x = x + self.input(x, embedding, batch.adapters)
            return (x * self.scale)[None]
        predicted, active = self.altup.predicted(streams, batch.adapters), self.altup.sizes.active
        computed = self.computed(predicted[active], angles, batch, kv)
        corrected = self.altup.corrected(predicted, computed, batch.adapters)
        if self.input is not None and embedding is not None:
            first = corrected[active]
            first = first if self.altup.output_scale is None else first * self.altup.output_scale
            corrected[1:] += self.input(first, embedding, batch.adapters)
        return corrected


@dataclass(frozen=True, slots=True)
class GemmaBody:
    """All layers, from the embedding of tokens to the residual stream before the last norm."""

    layers: tuple[GemmaLayer, ...]
    pairs: tuple[int, ...]  # per rotation table: number of rotated pairs of a head
    embeddings: LayerEmbeddings | None
    entries: tuple[Linear, ...] = ()  # projections of the embedding to the further residual streams
    exits: tuple[Linear, ...] = ()  # projections of the further residual streams, before all are averaged

    def hidden(self, x: torch.Tensor, angles: Rotation, batch: Batch, kv: KvPages) -> torch.Tensor:
        """Return the residual stream `[tokens, hidden]`. `x`: scaled embeddings; `angles`: of all tables."""
        embeddings = None
        if self.embeddings is not None:
            embeddings = self.embeddings(batch.token_ids, x, batch.adapters)
        tables = [angles.table(index).of_tokens() for index in range(len(self.pairs))]
        narrow = [
            Rotation(table.cos[:, :pairs].contiguous(), table.sin[:, :pairs].contiguous())
            for table, pairs in zip(tables, self.pairs, strict=True)
        ]
        streams = torch.stack([x, *(_as_large(entry(x, batch.adapters), x) for entry in self.entries)])
        for index, layer in enumerate(self.layers):
            streams = layer(streams, None if embeddings is None else embeddings[index], narrow, batch, kv)
        first = streams[0]
        if not self.exits:
            return first
        exits = zip(self.exits, streams[1:], strict=True)
        return torch.stack([first, *(_as_large(end(each, batch.adapters), first) for end, each in exits)]).mean(0)


def _as_large(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Scale each row of `x` to the mean square of the same row of `like`."""
    wanted = like.square().mean(-1, keepdim=True).sqrt()
    return x * wanted / x.square().mean(-1, keepdim=True).clamp(min=LEAST_MAGNITUDE).sqrt()
