"""Build the layers of Gemma 3n and Gemma 4 from a checkpoint."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from baton.engine.config.model_config import AltUpConfig, DecoderConfig, ExpertsConfig, GemmaConfig
from baton.engine.kv_cache.groups import LayerPlace, layer_places
from baton.engine.models.feed_forward import ExpertRouter, Experts, FeedForward, Gated
from baton.engine.models.gemma import (
    AltUp,
    ExpertsBeside,
    GemmaAttention,
    GemmaBody,
    GemmaLayer,
    Laurel,
    LayerEmbeddings,
    LayerInput,
    SparseGated,
    deviations_of,
)
from baton.engine.models.linear import Embedding, Linear, MatmulBackend
from baton.engine.models.residual import Norm
from baton.engine.weights.read import Size, WeightSource
from baton.engine.weights.weight import GgufWeight
from baton.kernels.types import Scoring


class GemmaParts(ABC):
    """Builder of the layers of Gemma 3n and Gemma 4. Abstract methods build parts that other families have too."""

    _source: WeightSource
    _backend: MatmulBackend

    @abstractmethod
    def _tensor(self, name: str, *shape: int) -> torch.Tensor: ...

    @abstractmethod
    def _norm_weight(self, config: DecoderConfig, name: str, size: int) -> torch.Tensor: ...

    @abstractmethod
    def _norm(self, config: DecoderConfig, name: str, size: int) -> Norm: ...

    @abstractmethod
    def _linear(self, names: Sequence[str], sizes: Sequence[Size], inputs: int, bias: bool = False) -> Linear: ...

    @abstractmethod
    def _embedding(self, stored: torch.Tensor | GgufWeight) -> Embedding: ...

    @abstractmethod
    def _router(self, config: DecoderConfig, experts: ExpertsConfig, prefix: str) -> ExpertRouter: ...

    @abstractmethod
    def _dense(self, config: DecoderConfig, prefix: str, inner: int) -> Gated: ...

    def _gemma_body(self, config: DecoderConfig, gemma: GemmaConfig, tables: Sequence[int]) -> GemmaBody:
        places, hidden = layer_places(config), config.hidden_size
        layers = [
            self._gemma_layer(config, gemma, index, table, places[gemma.sources[index]])
            for index, table in enumerate(tables)
        ]
        pairs = {table: shape.head_dim // 2 for table, shape in zip(tables, gemma.shapes, strict=True)}
        further = range(0 if gemma.altup is None else gemma.altup.streams - 1)
        entries, exits = (
            tuple(self._linear([f"model.{name}.{index}"], (hidden,), hidden) for index in further)
            for name in ("altup_projections", "altup_unembed_projections")
        )
        widths = tuple(pairs[table] for table in range(len(pairs)))
        return GemmaBody(tuple(layers), widths, self._layer_embeddings(config, gemma), entries, exits)

    def _layer_embeddings(self, config: DecoderConfig, gemma: GemmaConfig) -> LayerEmbeddings | None:
        size, total = gemma.embedding_size, gemma.embedding_size * config.num_layers
        if not size:
            return None
        table = self._source.embedding("model.embed_tokens_per_layer.weight", gemma.embedding_vocab, total)
        return LayerEmbeddings(
            self._embedding(table),
            gemma.embedding_vocab,
            size,
            self._linear(["model.per_layer_model_projection"], (total,), config.hidden_size),
            self._norm(config, "model.per_layer_projection_norm", size),
        )

    def _gemma_layer(
        self, config: DecoderConfig, gemma: GemmaConfig, index: int, table: int, place: LayerPlace
    ) -> GemmaLayer:
        prefix, hidden, size = f"model.layers.{index}.", config.hidden_size, gemma.embedding_size

        def norm(name: str) -> Norm:
            return self._norm(config, prefix + name, hidden)

        made = None
        if size:
            gate = self._linear([f"{prefix}per_layer_input_gate"], (size,), hidden)
            projection = self._linear([f"{prefix}per_layer_projection"], (hidden,), size)
            made = LayerInput(gate, projection, norm("post_per_layer_input_norm"))
        altup = gemma.altup
        return GemmaLayer(
            attention_norm=norm("input_layernorm"),
            attention=self._gemma_attention(config, gemma, index, table, place),
            attention_end_norm=norm("post_attention_layernorm"),
            feed_forward_norm=norm("pre_feedforward_layernorm"),
            feed_forward=self._gemma_feed_forward(config, gemma, index),
            feed_forward_end_norm=norm("post_feedforward_layernorm"),
            experts=None if config.experts is None else self._experts_beside(config, config.experts, prefix),
            input=made,
            scale=self._source.number(f"{prefix}layer_scalar") if gemma.scales_layers else 1.0,
            laurel=None if altup is None else self._laurel(config, altup, f"{prefix}laurel."),
            altup=None if altup is None else self._altup(config, altup, f"{prefix}altup."),
        )

    def _gemma_attention(
        self, config: DecoderConfig, gemma: GemmaConfig, index: int, table: int, place: LayerPlace
    ) -> GemmaAttention:
        prefix, shape, bias = f"model.layers.{index}.self_attn.", gemma.shapes[index], config.attention_bias
        queries, reads = config.num_heads * shape.head_dim, gemma.sources[index] != index
        equal = gemma.keys_as_values[index]
        stored = [] if reads else ["k_proj"] if equal else ["k_proj", "v_proj"]
        names, sizes = ["q_proj", *stored], [queries, *[shape.numbers] * len(stored)]
        return GemmaAttention(
            qkv=self._linear([prefix + name for name in names], sizes, config.hidden_size, bias),
            query_norm=self._norm_weight(config, f"{prefix}q_norm", shape.head_dim),
            key_norm=None if reads else self._norm_weight(config, f"{prefix}k_norm", shape.head_dim),
            value_norm=self._backend.keep(torch.ones(shape.head_dim, device=self._backend.device)),
            keys_as_values=equal,
            output=self._linear([f"{prefix}o_proj"], (config.hidden_size,), queries, config.output_bias),
            heads=config.num_heads,
            shape=shape,
            eps=config.rms_norm_eps,
            scoring=Scoring(config.attention_scale, config.sliding_window[index]),
            table=table,
            place=place,
        )

    def _gemma_feed_forward(self, config: DecoderConfig, gemma: GemmaConfig, index: int) -> FeedForward:
        dense = self._dense(config, f"model.layers.{index}.mlp.", gemma.inner_sizes[index])
        share = gemma.sparsity[index]
        return SparseGated(dense.gate_up, dense.down, deviations_of(share)) if share else dense

    def _experts_beside(self, config: DecoderConfig, experts: ExpertsConfig, prefix: str) -> ExpertsBeside:
        hidden, names = config.hidden_size, [f"{prefix}experts.{index}." for index in range(experts.count)]
        scale = self._tensor(f"{prefix}router.scale", hidden).float() * hidden**-0.5
        return ExpertsBeside(
            dense_norm=self._norm(config, f"{prefix}post_feedforward_layernorm_1", hidden),
            router_norm=Norm(scale, config.rms_norm_eps),
            norm=self._norm(config, f"{prefix}pre_feedforward_layernorm_2", hidden),
            experts=Experts(
                router=self._router(config, experts, prefix),
                experts=tuple(self._dense(config, name, experts.inner_size) for name in names),
            ),
            scales=self._tensor(f"{prefix}router.per_expert_scale", experts.count).float(),
            end_norm=self._norm(config, f"{prefix}post_feedforward_layernorm_2", hidden),
        )

    def _laurel(self, config: DecoderConfig, altup: AltUpConfig, prefix: str) -> Laurel:
        hidden, rank = config.hidden_size, altup.laurel_rank
        left = self._linear([f"{prefix}linear_left"], (rank,), hidden)
        right = self._linear([f"{prefix}linear_right"], (hidden,), rank)
        return Laurel(left, right, self._norm(config, f"{prefix}post_laurel_norm", hidden))

    def _altup(self, config: DecoderConfig, altup: AltUpConfig, prefix: str) -> AltUp:
        count, hidden = altup.streams, config.hidden_size

        def linear(name: str, outputs: int, inputs: int) -> Linear:
            return self._linear([prefix + name], (outputs,), inputs)

        scale = self._tensor(f"{prefix}correct_output_scale", hidden)
        return AltUp(
            altup,
            self._norm(config, f"{prefix}router_norm", hidden),
            linear("modality_router", count, hidden),
            linear("prediction_coefs", count * count, count),
            linear("correction_coefs", count, count),
            scale if altup.scales_output else None,
        )
