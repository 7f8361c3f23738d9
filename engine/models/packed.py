"""Projections laid out for the native kernels of a CPU, and a decoder's layers in one call where all of them are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from baton.engine.config.model_config import DecoderConfig
from baton.engine.lora.linear import AdaptedLinear
from baton.engine.models.batch import AdapterRows, Batch
from baton.engine.models.checkpoint import Ends, TensorSource, rows_of, take_embedding, take_head
from baton.engine.models.decoder import DecoderModel, Layer, Rotation
from baton.engine.models.feed_forward import Gated
from baton.engine.models.linear import DenseEmbedding, DenseLinear, Linear, PackedEmbedding
from baton.engine.weights.quantised import Int4Linear, Int8Linear, quantise_int8
from baton.kernels.decoder import DecoderLayers, PackedDecoder, PackedLayer, runs_natively
from baton.kernels.huge_pages import HugePages
from baton.kernels.linear import GATHERED, packed_linear
from baton.kernels.native.library import native_library
from baton.kernels.packed_weight import PackedWeight, Stored, pack, pack_int4, pack_int8, takes_groups
from baton.kernels.types import KvPages

AT_ONCE_ROWS = 4096  # of a weight that is looked through


def packs(device: torch.device) -> bool:
    """Whether packed projections are faster here than PyTorch's."""
    return device.type == "cpu" and native_library() is not None


@dataclass(frozen=True, slots=True)
class PackedLinear:
    weight: PackedWeight
    wants_largest: bool = False
    """Whether one input more, whose weights are 0, is to be the largest of a whole row, of which this has a part: it
    decides the scale by which the row is rounded."""

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        return packed_linear(x.float(), self.weight).to(x.dtype)


def packed(linear: Linear) -> Linear:
    """The same projection, packed, if it is of a kind that can be. Nothing of a float32 weight is lost."""
    if isinstance(linear, Int8Linear):
        weight = F.pad(linear.weight, (0, 1)) if linear.is_part else linear.weight
        return PackedLinear(pack_int8(weight, linear.scales, linear.bias), linear.is_part)
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
    return all(torch.equal(part, part.bfloat16().float()) for part in tensor.split(AT_ONCE_ROWS))


class PackingTensors:
    """Packs every projection while it is read, one at a time, into large pages; with `int8_head`, the head as integers
    of 8 bits, since a step reads all of it, and of small models it is a good part of the weights.

    Nothing of a model so read is a view of a file, which would keep all of the file in memory.
    """

    def __init__(self, source: TensorSource, int8_head: bool = False) -> None:
        self._source = source
        self._int8_head = int8_head
        self._pages = HugePages()

    def take(self, name: str, *shape: int) -> torch.Tensor:
        return self._pages.copy(self._source.take(name, *shape))

    def linear(self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool = False) -> Linear:
        linear = self._source.linear(names, sizes, inputs, bias)
        return self._head(linear) if list(names) == ["lm_head"] else self._packed(linear)

    def ends(self, config: DecoderConfig, head_rows: range | None = None) -> Ends:
        """As read_ends. To be read before the layers, while there is most room for packing.

        An embedding and the head that it is tied to are one weight, unless the head is made of integers, so that the
        numbers differ, or is cut.
        """
        if not config.tie_word_embeddings:
            head = take_head(config, self)
            return Ends(DenseEmbedding(_narrow(take_embedding(config, self._source))), head)
        embedding = take_embedding(config, self._source)
        head = self._head(DenseLinear(rows_of(embedding, head_rows)))
        if head_rows is None and isinstance(head, PackedLinear) and head.weight.stored in GATHERED:
            return Ends(PackedEmbedding(head.weight), head)
        return Ends(DenseEmbedding(_narrow(embedding)), head)

    def _head(self, linear: Linear) -> Linear:
        return self._packed(_int8(linear) if self._int8_head else linear)

    def _packed(self, linear: Linear) -> Linear:
        made = packed(linear)
        if not isinstance(made, PackedLinear):
            return made
        weight = made.weight
        # All of it, small tensors too: they would hold memory in place that is freed while a model is read.
        rest = (weight.bias, weight.scales, weight.sums, weight.zeros)
        bias, scales, sums, zeros = (None if part is None else self._pages.copy(part) for part in rest)
        data = self._pages.copy(weight.data)
        weight = replace(weight, data=data, bias=bias, scales=scales, sums=sums, zeros=zeros)
        return replace(made, weight=weight)


def _narrow(embedding: torch.Tensor) -> torch.Tensor:
    """A copy, no wider than need be."""
    wide = embedding.dtype == torch.float32 and is_bfloat16(embedding)
    return embedding.bfloat16() if wide else embedding.clone()


def with_native_layers(model: DecoderModel) -> DecoderModel:
    """Of a model read through PackingTensors: its layers in one call, if all of them are packed."""
    layers = [_packed_layer(layer) for layer in model.layers]
    whole = tuple(layer for layer in layers if layer is not None)
    if len(whole) < len(layers):
        return model
    return replace(model, native=NativeLayers(PackedDecoder(whole, model.config.num_heads, model.config.rms_norm_eps)))


class NativeLayers:
    """A decoder's layers, for any pool; keeps the preparation for the last one."""

    def __init__(self, decoder: PackedDecoder) -> None:
        self._decoder = decoder
        self._pool: KvPages | None = None
        self._layers: DecoderLayers | None = None

    def take(self, x: torch.Tensor, angles: Rotation, batch: Batch, kv: KvPages) -> bool:
        """As in AllLayers: `x` float32 `[tokens, hidden]`."""
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
