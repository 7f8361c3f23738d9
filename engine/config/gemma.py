"""Convert transformers' fields of Gemma 3n and Gemma 4 to a GemmaConfig."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from baton.engine.config.limits import positive_sizes
from baton.engine.config.model_config import AltUpConfig, GemmaConfig, HeadShape, ModelError, NotInDecoderError

OVERRIDES = ("head_dim", "num_key_value_heads")  # fields of `per_layer_config` that the decoder supports


class UnitShape(NamedTuple):
    """Shape in which the pool stores keys; the keys of each layer have room in one or several of this shape."""

    kv_heads: int
    head_dim: int


def gemma_config(fields: Mapping[str, Any]) -> GemmaConfig:
    """Convert the fields of config.json. Raises: ModelError, NotInDecoderError."""
    layers, kinds = int(fields["num_hidden_layers"]), fields["layer_types"]
    shared = int(fields.get("num_kv_shared_layers") or 0)
    altup = _altup(fields)
    inner = fields["intermediate_size"]
    inner_sizes = list(inner) if isinstance(inner, Sequence) else [int(inner)] * layers
    if fields.get("use_double_wide_mlp"):
        inner_sizes[layers - shared :] = [2 * size for size in inner_sizes[layers - shared :]]
    sparsity = fields.get("activation_sparsity_pattern") or [0.0] * layers
    if not all(0 <= share < 1 for share in sparsity):
        raise ModelError(
            f"config.json: activation_sparsity_pattern {sparsity} must have numbers of at least 0, below 1"
        )
    equal = bool(fields.get("attention_k_eq_v"))
    size = int(fields.get("hidden_size_per_layer_input") or 0)
    if altup is not None and not size:
        raise ModelError("config.json: hidden_size_per_layer_input must be a positive integer")
    return GemmaConfig(
        shapes=_shapes(fields, layers),
        sources=_sources(kinds, layers, shared),
        keys_as_values=tuple(equal and kind == "full_attention" for kind in kinds),
        inner_sizes=tuple(map(int, inner_sizes)),
        sparsity=tuple(map(float, sparsity)),
        embedding_size=size,
        embedding_vocab=int(fields["vocab_size_per_layer_input"]) if size else 0,
        scales_layers=altup is None,
        altup=altup,
    )


def pool_shape(shapes: Sequence[HeadShape]) -> UnitShape:
    """Return the largest shape of which the keys of each layer are a multiple."""
    numbers = math.gcd(*(shape.numbers for shape in shapes))
    return next((UnitShape(*shape) for shape in shapes if shape.numbers == numbers), UnitShape(1, numbers))


def _altup(fields: Mapping[str, Any]) -> AltUpConfig | None:
    if "altup_num_inputs" not in fields:
        return None
    streams, rank = positive_sizes(fields, "altup_num_inputs", "laurel_rank")
    active = int(fields["altup_active_idx"])
    if not 0 <= active < streams:
        raise ModelError(f"config.json: altup_active_idx {active} is not in 0 to {streams - 1}")
    return AltUpConfig(streams, active, bool(fields["altup_correct_scale"]), rank)


def _shapes(fields: Mapping[str, Any], layers: int) -> tuple[HeadShape, ...]:
    stated = {int(index): own for index, own in (fields.get("per_layer_config") or {}).items()}
    shapes = []
    for index in range(layers):
        own = stated.get(index, {})
        if not set(own) <= set(OVERRIDES):
            raise NotInDecoderError(
                f"config.json: per_layer_config of layer {index} may have {', '.join(OVERRIDES)} only"
            )
        head_dim, kv_heads = positive_sizes({**fields, **own}, *OVERRIDES)
        heads = int(fields["num_attention_heads"])
        if heads % kv_heads or head_dim % 2:
            raise ModelError(
                f"config.json: layer {index} has num_key_value_heads {kv_heads}, which must divide "
                f"num_attention_heads {heads}, and head_dim {head_dim}, which must be even"
            )
        shapes.append(HeadShape(kv_heads, head_dim))
    return tuple(shapes)


def _sources(kinds: Sequence[str], layers: int, shared: int) -> tuple[int, ...]:
    """Return the layer whose keys and values each layer reads: the last `shared` layers read an earlier layer's."""
    own = layers - shared
    if shared and not set(kinds[own:]) <= set(kinds[: max(own, 0)]):
        raise ModelError(
            f"config.json: num_kv_shared_layers {shared} leaves no layer of each kind with keys and values"
        )
    last = {kind: index for index, kind in enumerate(kinds[:own])}
    return tuple(index if index < own else last[kinds[index]] for index in range(layers))
