"""Decoder sharded over ranks: outputs of attention and feed-forward layers are summed, logits concatenated."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from baton.engine.config.model_config import DecoderConfig
from baton.engine.lora.adapters import AdaptedLinear
from baton.engine.models.batch import AdapterRows, Batch
from baton.engine.models.decoder import DecoderModel, Layer
from baton.engine.models.feed_forward import Experts, FeedForward, Gated, GatedExpert, with_packed
from baton.engine.models.linear import Linear, PackedLinear
from baton.engine.models.residual import WholeNorms
from baton.engine.parallel.collectives import Collectives
from baton.kernels.types import KvPages


@dataclass(frozen=True, slots=True)
class SummedLinear:
    """Projection sharded by inputs, or feed-forward layer of such projections, with outputs summed over all ranks."""

    part: Linear
    collectives: Collectives

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        return self.collectives.sum(self.part(x, adapters))


@dataclass(frozen=True, slots=True)
class ScaledLinear:
    """Projection that quantises this rank's part of each input row with the scale of the complete row."""

    part: Linear
    collectives: Collectives

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        largest = self.collectives.largest(x.abs().amax(1, keepdim=True))
        return self.part(torch.cat((x, largest), dim=1), adapters)


@dataclass(frozen=True, slots=True)
class ParallelModel:
    """This rank's part of a sharded model; a `Model` that runners execute."""

    part: DecoderModel
    collectives: Collectives
    announce_logits: Callable[[int], None]  # sends the other ranks the number of rows that need logits

    @property
    def config(self) -> DecoderConfig:
        """Configuration of this rank's part of the model."""
        return self.part.config

    @property
    def dtype(self) -> torch.dtype:
        return self.part.dtype

    @property
    def device(self) -> torch.device:
        return self.part.device

    def hidden(self, batch: Batch, kv: KvPages) -> torch.Tensor:
        """Compute the unsharded hidden states, equal on every rank, and write the KV of this rank's heads."""
        return self.part.hidden(batch, kv)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.announce_logits(len(hidden))
        return self.logits_together(hidden.to(self.dtype).contiguous())

    def normal(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.part.normal(hidden)

    def logits_together(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits on all ranks. `hidden`: `[rows, hidden]`, model's dtype; the leader's rows overwrite it."""
        self.collectives.from_leader(hidden)
        return self.collectives.side_by_side(self.part.logits(hidden), self.config.vocab_size)


def parallel_part(model: DecoderModel, collectives: Collectives) -> DecoderModel:
    """Return this rank's part of a model that sums outputs of attention and feed-forward layers over all ranks."""
    return replace(model, layers=tuple(_summed(layer, collectives) for layer in model.layers))


def _summed(layer: Layer, collectives: Collectives) -> Layer:
    norms = layer.head_norms
    if isinstance(norms, WholeNorms):
        norms = replace(norms, ranks=collectives.shard.degree, total=collectives.sum)
    return replace(
        layer,
        head_norms=norms,
        output=layer.output and SummedLinear(_scaled(layer.output, collectives), collectives),
        feed_forward=layer.feed_forward
        and SummedLinear(_with_scaled_inputs(layer.feed_forward, collectives), collectives),
    )


def _with_scaled_inputs(feed_forward: FeedForward, collectives: Collectives) -> FeedForward:
    """Apply `_scaled` to down projections. Routers are not sharded, so all ranks choose the same experts."""
    if isinstance(feed_forward, Gated):
        return replace(feed_forward, down=_scaled(feed_forward.down, collectives))
    if isinstance(feed_forward, GatedExpert):
        return replace(
            feed_forward, expert=replace(feed_forward.expert, down=_scaled(feed_forward.expert.down, collectives))
        )
    if isinstance(feed_forward, Experts):
        experts = (replace(expert, down=_scaled(expert.down, collectives)) for expert in feed_forward.experts)
        shared = None if feed_forward.shared is None else _with_scaled_inputs(feed_forward.shared, collectives)
        return with_packed(replace(feed_forward, experts=tuple(experts), shared=shared, packed=None))
    return feed_forward


def _scaled(linear: Linear, collectives: Collectives) -> Linear:
    if isinstance(linear, AdaptedLinear):  # wrap only its base: adapters read unscaled inputs
        linear.base = _scaled(linear.base, collectives)
        return linear
    wants_largest = isinstance(linear, PackedLinear) and linear.wants_largest
    return ScaledLinear(linear, collectives) if wants_largest else linear
