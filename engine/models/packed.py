"""Projections laid out for the native kernels of a CPU, and a decoder's layers in one call where all of them are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.batch import Batch
from engine.lora.linear import AdaptedLinear
from engine.lora.rows import AdapterRows
from engine.models.checkpoint import TensorSource
from engine.models.decoder import DecoderModel, Layer
from engine.models.feed_forward import Gated
from engine.models.linear import DenseLinear, Linear
from engine.quantization.int8 import Int8Linear
from engine.rope import Rotation
from kernels.decoder_layers import DecoderLayers, PackedDecoder, PackedLayer, runs_natively
from kernels.kv_pages import KvPages
from kernels.native.library import native_library
from kernels.packed_linear import packed_linear
from kernels.packed_weight import PackedWeight, Stored, pack, pack_int8
from kernels.rotate_and_store import HeadNorms


def packs(device: torch.device) -> bool:
    """Whether packed projections are faster here than PyTorch's."""
    return device.type == "cpu" and native_library() is not None


@dataclass(frozen=True, slots=True)
class PackedLinear:
    weight: PackedWeight

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        return packed_linear(x.float(), self.weight).to(x.dtype)


def packed(linear: Linear) -> Linear:
    """The same projection, packed, if it is of a kind that can be. Nothing of a float32 weight is lost."""
    if isinstance(linear, Int8Linear):
        return PackedLinear(pack_int8(linear.weight, linear.scales, linear.bias))
    if not isinstance(linear, DenseLinear):
        return linear
    if linear.weight.dtype == torch.bfloat16:
        return PackedLinear(pack(linear.weight, Stored.ROUNDING, linear.bias))
    stored = Stored.BFLOAT16 if is_bfloat16(linear.weight) else Stored.FLOAT32
    return PackedLinear(pack(linear.weight, stored, linear.bias))


def is_bfloat16(tensor: torch.Tensor) -> bool:
    """Whether a float32 tensor holds nothing but numbers of bfloat16."""
    return torch.equal(tensor, tensor.bfloat16().float())


class PackingTensors:
    """Packs every projection while it is read, one at a time."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    def take(self, name: str, *shape: int) -> torch.Tensor:
        return self._source.take(name, *shape)

    def linear(self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool = False) -> Linear:
        return packed(self._source.linear(names, sizes, inputs, bias))


def with_native_layers(model: DecoderModel) -> DecoderModel:
    """Of a model read through PackingTensors: its head packed too, its embedding no wider than need be."""
    head, embedding = packed(model.head), model.embedding
    if embedding.dtype == torch.float32 and is_bfloat16(embedding):
        embedding = embedding.bfloat16()
    layers = [_packed_layer(layer) for layer in model.layers]
    whole = tuple(layer for layer in layers if layer is not None)
    native = None
    if len(whole) == len(layers):
        native = NativeLayers(PackedDecoder(whole, model.config.num_heads, model.config.rms_norm_eps))
    return replace(model, head=head, embedding=embedding, native=native)


class NativeLayers:
    """A decoder's layers, for any pool; keeps what was prepared for the last one."""

    def __init__(self, decoder: PackedDecoder) -> None:
        self._decoder = decoder
        self._pool: KvPages | None = None
        self._layers: DecoderLayers | None = None

    def take(self, x: torch.Tensor, angles: Rotation, batch: Batch, kv: KvPages) -> bool:
        """Computes all layers, in place: `x` float32 `[tokens, hidden]`. False, with nothing done, where it cannot."""
        if kv is not self._pool:
            self._pool = kv
            self._layers = DecoderLayers(self._decoder, kv) if runs_natively(self._decoder, kv) else None
        if self._layers is None:
            return False
        self._layers(x, *angles, batch)
        return True


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
