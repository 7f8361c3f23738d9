"""A decoder's layers in one call of the CPU's native kernels, where all of them are packed."""

from dataclasses import replace

from baton.engine.lora.adapters import AdaptedLinear
from baton.engine.models.batch import Batch
from baton.engine.models.decoder import DecoderModel, Layer, Rotation
from baton.engine.models.feed_forward import Gated
from baton.engine.models.linear import Linear, PackedLinear
from baton.kernels.decoder import NativeDecoder, PackedDecoder, PackedLayer
from baton.kernels.packed_weight import PackedWeight
from baton.kernels.types import KvPages
import torch


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
    decoder = PackedDecoder(whole, model.config.num_heads, eps, embedding, norm.float(), own_head)
    return replace(model, native=NativeDecoder(decoder))


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
