"""Projections laid out for the native kernels of a CPU, and a decoder's layers in one call where all of them are."""

import logging
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
from engine.models.primitive import ChosenLinear, PrimitiveChoice, in_onednn, onednn_from_rows
from engine.quantization.int4 import Int4Linear
from engine.quantization.int8 import Int8Linear, quantise_int8
from engine.rope import Rotation
from kernels.decoder_layers import DecoderLayers, PackedDecoder, PackedLayer, runs_natively
from kernels.huge_pages import move_to_huge_pages
from kernels.kv_pages import KvPages
from kernels.native.library import native_library
from kernels.packed_linear import packed_linear
from kernels.packed_weight import PackedWeight, Stored, pack, pack_int4, pack_int8, takes_groups

logger = logging.getLogger(__name__)


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
    if isinstance(linear, Int4Linear):
        return _packed_int4(linear)
    if not isinstance(linear, DenseLinear):
        return linear
    if linear.weight.dtype == torch.bfloat16:
        return PackedLinear(pack(linear.weight, Stored.ROUNDING, linear.bias))
    stored = Stored.BFLOAT16 if is_bfloat16(linear.weight) else Stored.FLOAT32
    return PackedLinear(pack(linear.weight, stored, linear.bias))


def _packed_int4(linear: Int4Linear) -> Linear:
    """As it is where its inputs are in another order, its groups are odd, or its scales are no float16."""
    scales, inputs = linear.scales.half(), 2 * linear.packed.shape[1]
    fits = linear.column_order is None and takes_groups(inputs, scales.shape[1])
    if not fits or not torch.equal(scales.to(linear.scales.dtype), linear.scales):
        return linear
    return PackedLinear(pack_int4(linear.weight().codes, scales, linear.zeros, linear.bias))


def _int8(linear: Linear) -> Linear:
    return quantise_int8(linear.weight.float(), linear.bias) if isinstance(linear, DenseLinear) else linear


def is_bfloat16(tensor: torch.Tensor) -> bool:
    """Whether a float32 tensor holds nothing but numbers of bfloat16."""
    return torch.equal(tensor, tensor.bfloat16().float())


class PackingTensors:
    """Packs every projection while it is read, one at a time; with `int8_head`, the head as integers of 8 bits."""

    def __init__(self, source: TensorSource, int8_head: bool = False) -> None:
        self._source = source
        self._int8_head = int8_head

    def take(self, name: str, *shape: int) -> torch.Tensor:
        return self._source.take(name, *shape)

    def linear(self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool = False) -> Linear:
        linear = self._source.linear(names, sizes, inputs, bias)
        return packed(_int8(linear) if self._int8_head and list(names) == ["lm_head"] else linear)


def with_native_layers(
    model: DecoderModel, int8_head: bool = False, choice: PrimitiveChoice | None = None
) -> DecoderModel:
    """Of a model read through PackingTensors: its head packed too, its embedding no wider than need be.

    `int8_head`: a step reads all of the head, which of small models is a good part of the weights. `choice`: where
    oneDNN is chosen for many rows, the layers are kept in its packing too; without, it never is.
    """
    embedding = model.embedding
    head = packed(_int8(model.head) if int8_head else model.head)
    if embedding.dtype == torch.float32 and is_bfloat16(embedding):
        embedding = embedding.bfloat16()
    layers = [_packed_layer(layer) for layer in model.layers]
    whole = tuple(layer for layer in layers if layer is not None)
    model = replace(model, head=head, embedding=embedding)
    if len(whole) < len(layers):
        return model
    read_by_each_step = [weight for layer in whole for weight in _projections(layer)]
    if isinstance(head, PackedLinear):
        read_by_each_step.append(head.weight)
    move_to_huge_pages([weight.data for weight in read_by_each_step])
    decoder = PackedDecoder(whole, model.config.num_heads, model.config.rms_norm_eps)
    rows = None if choice is None else _onednn_from_rows(model, whole, choice)
    if rows is None:
        return replace(model, native=NativeLayers(decoder))
    both = tuple(_in_both(layer, rows, model.dtype) for layer in model.layers)
    return replace(model, layers=both, native=NativeLayers(decoder, rows))


def with_onednn(model: DecoderModel, choice: PrimitiveChoice) -> DecoderModel:
    """Of layers that are computed one by one: those projections in both packings, where `choice` comes to that."""
    whole = tuple(packed for layer in model.layers if (packed := _packed_layer(layer)) is not None)
    rows = _onednn_from_rows(model, whole, choice) if len(whole) == len(model.layers) else None
    if rows is None:
        return model
    return replace(model, layers=tuple(_in_both(layer, rows, model.dtype) for layer in model.layers))


def _onednn_from_rows(model: DecoderModel, whole: Sequence[PackedLayer], choice: PrimitiveChoice) -> int | None:
    rows = onednn_from_rows(choice, _projections(whole[0]), len(whole), model.dtype)
    if rows is not None:
        numbers = sum(each.outputs * each.inputs for layer in whole for each in _projections(layer))
        more = numbers * model.dtype.itemsize / 2**20
        logger.info("linear layers from %d rows on: oneDNN, %.0f MiB more", rows, more)
    return rows


def _projections(layer: PackedLayer) -> tuple[PackedWeight, ...]:
    return layer.qkv, layer.output, layer.gate_up, layer.down


def _in_both(layer: Layer, from_rows: int, dtype: torch.dtype) -> Layer:
    """With its projections in both packings; those that requests may adapt stay as they are."""

    def both(linear: Linear) -> Linear:
        if not isinstance(linear, PackedLinear):
            return linear
        return ChosenLinear(linear, in_onednn(linear.weight, dtype), from_rows)

    feed_forward = layer.feed_forward
    if isinstance(feed_forward, Gated):
        feed_forward = replace(feed_forward, gate_up=both(feed_forward.gate_up), down=both(feed_forward.down))
    return replace(layer, qkv=both(layer.qkv), output=both(layer.output), feed_forward=feed_forward)


class NativeLayers:
    """A decoder's layers, for any pool; keeps what was prepared for the last one."""

    def __init__(self, decoder: PackedDecoder, too_many_rows: int | None = None) -> None:
        """From `too_many_rows` on, batches are left to others."""
        self._decoder = decoder
        self._too_many_rows = too_many_rows
        self._pool: KvPages | None = None
        self._layers: DecoderLayers | None = None

    def take(self, x: torch.Tensor, angles: Rotation, batch: Batch, kv: KvPages) -> bool:
        """As in AllLayers: `x` float32 `[tokens, hidden]`."""
        if self._too_many_rows is not None and len(x) >= self._too_many_rows:
            return False
        if kv is not self._pool:
            self._pool = kv
            self._layers = DecoderLayers(self._decoder, kv) if runs_natively(self._decoder, kv) else None
        if self._layers is None:
            return False
        batch.meanwhile()
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
