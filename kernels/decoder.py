"""A decoder on a CPU: all layers over one batch in one call, so that nothing stands between its operations."""

import ctypes
from collections.abc import Callable
from ctypes import Structure, byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from baton.kernels.native.library import (
    MOST_PIECES,
    PagesStruct,
    ScoringStruct,
    WeightStruct,
    attends,
    native_library,
    native_threads,
    pages_struct,
    pointer,
    pointers,
    scoring_struct,
    weight_struct,
)
from baton.kernels.packed_weight import PackedWeight
from baton.kernels.types import Gate, HeadNorms, KvLayer, KvPages, PagedRows, Scoring


class Embedded(NamedTuple):
    """How tokens become rows: of `weight`, times `scale` in the model's dtype."""

    weight: torch.Tensor | PackedWeight  # [vocab, hidden], of any float; or a packed weight of plain numbers
    scale: float
    dtype: torch.dtype


class LayerNorms(NamedTuple):
    """`[hidden]` each, or None where there is none: before both parts of a layer, and of what these add."""

    attention: torch.Tensor | None
    feed_forward: torch.Tensor | None
    attention_end: torch.Tensor | None
    feed_forward_end: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """Weights of norms are float32."""

    norms: LayerNorms
    qkv: PackedWeight
    head_norms: HeadNorms | None
    norms_are_whole: bool  # `head_norms`: each of all heads of a token, whose sizes they have
    output: PackedWeight
    gate_up: PackedWeight
    gate: Gate
    down: PackedWeight
    scoring: Scoring
    table: int  # of the cosines and sines by which it rotates


class _Layer(Structure):
    _fields_ = (
        *((name, WeightStruct) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "feed_forward_norm")),
        *((name, c_void_p) for name in ("attention_end_norm", "feed_forward_end_norm", "query_norm", "key_norm")),
        ("scoring", ScoringStruct),
        *((name, c_void_p) for name in ("pages", "scales")),
        *((name, c_int32) for name in ("table", "norms_are_whole", "gate")),
    )


class _Chunk(Structure):
    _fields_ = (("block_ids", c_void_p), *((name, c_int64) for name in ("first_row", "tokens", "start")))


class _Arguments(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("layers", "chunks")),
        ("pages", PagesStruct),
        *((name, c_void_p) for name in ("residual", "scratch", "cos", "sin", "slots")),
        *((name, c_void_p) for name in ("block_ids", "block_starts", "context_tokens")),
        *((name, c_int64) for name in ("layer_count", "chunk_count", "rows", "decode_rows")),
        *((name, c_int64) for name in ("hidden", "inner", "heads", "kv_heads", "head_dim", "rotary_dim")),
        ("eps", c_float),
        ("threads", c_int32),
    )


class NativeDecoder:
    """A decoder over any pool; keeps the preparation for the last one. One call at a time.

    Structs of weights and pages are made once, those of rows at every step. `scratch` grows with the largest batch.
    """

    def __init__(
        self,
        layers: tuple[PackedLayer, ...],
        heads: int,
        eps: float,
        embedding: Embedded,
        norm: torch.Tensor,
        head: PackedWeight | None,
    ) -> None:
        """`eps`: of all norms. norm: `[hidden]`, before the head. `head`: where logits are computed from float32 too.

        Raises: ValueError where there are no native kernels.
        """
        native = native_library()
        if native is None:
            raise ValueError("no native kernels are built")
        self._native = native
        self.layers, self.heads, self.head = layers, heads, head
        self._eps, self._embedding, self._norm = eps, embedding, norm
        self._pool: KvPages | None = None  # of the arguments, which borrow it
        self._runs = False
        self._scratch = torch.empty(0)

    def takes(self, kv: KvPages) -> bool:
        """Whether native kernels compute it over these pages; prepares it."""
        if kv is not self._pool:
            self._pool, self._runs = kv, runs_natively(self, kv)
            if self._runs:
                self._prepare(kv)
        return self._runs

    def hidden(
        self, batch: PagedRows, cos: torch.Tensor, sin: torch.Tensor, meanwhile: Callable[[], None]
    ) -> torch.Tensor:
        """Float32 `[rows, hidden]`: what the last layer leaves, over the pages that `takes` was asked of last.

        cos, sin: float32 `[tables, rows, angles]`, see `rotary`. Keys and values of all rows go to their slots of the
        pool. No row's result depends on rows of other sequences. `meanwhile` is called once, just before the layers.
        Raises: IndexError for a token that is not in the vocabulary.
        """
        residual, decode = self._embedded(batch.token_ids), batch.decode
        arguments, rows = self._arguments, len(residual)
        arguments.threads = native_threads()
        arguments.rows, arguments.rotary_dim = rows, 2 * cos.shape[2]
        arguments.residual, arguments.cos, arguments.sin = pointers((residual, cos, sin))
        arguments.slots = batch.slots.data_ptr()
        decode_rows = arguments.decode_rows = 0 if decode is None else len(decode.context_tokens)
        if decode is not None:
            arguments.block_ids = decode.block_ids.data_ptr()
            arguments.block_starts = decode.block_starts.data_ptr()
            arguments.context_tokens = decode.context_tokens.data_ptr()
        prefills = () if batch.prefills is None else batch.prefills.chunks
        chunks = (_Chunk * len(prefills))()
        for chunk, each in zip(chunks, prefills, strict=True):
            chunk.block_ids, chunk.start = each.block_ids.data_ptr(), each.start
            chunk.first_row, chunk.tokens = each.rows.start, each.rows.stop - each.rows.start
        arguments.chunks, arguments.chunk_count = ctypes.addressof(chunks), len(chunks)
        self._reserve(rows, decode_rows * MOST_PIECES)
        meanwhile()
        self._native.decoder_layers(byref(arguments))
        return residual

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 `[rows, vocab]` of rows of `hidden()`. Raises: ValueError without a head."""
        if self.head is None:
            raise ValueError("the head is not packed")
        return self._native.packed_linear(self._native.rms_norm(hidden, self._norm, self._eps), self.head)

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """A new float32 `[tokens, hidden]`."""
        weight, scale, dtype = self._embedding
        if isinstance(weight, PackedWeight):
            rows = self._native.gather_rows(token_ids, weight)
        else:
            rows = F.embedding(token_ids, weight)
        return (rows if scale == 1.0 else rows.to(dtype) * scale).float()

    def _prepare(self, kv: KvPages) -> None:
        structs = (_layer(layer, kv.layer(index)) for index, layer in enumerate(self.layers))
        self._structs = (_Layer * len(self.layers))(*structs)
        first = self.layers[0]
        self._arguments = _Arguments(
            layers=ctypes.addressof(self._structs),
            pages=pages_struct(kv.layer(0)),
            layer_count=len(self.layers),
            hidden=first.output.outputs,
            inner=first.down.inputs,
            heads=self.heads,
            kv_heads=kv.kv_heads,
            head_dim=kv.head_dim,
            eps=self._eps,
            scratch=self._scratch.data_ptr(),
        )

    def _reserve(self, rows: int, parts: int) -> None:
        """Memory for what decoder.cpp takes from it."""
        asked = self._arguments
        heads_size, kv_size = asked.heads * asked.head_dim, asked.kv_heads * asked.head_dim
        of_row = asked.hidden + 3 * heads_size + 2 * kv_size + asked.inner
        wanted = rows * of_row + parts * asked.heads * (asked.head_dim + 2)
        if wanted > len(self._scratch):
            self._scratch = torch.empty(wanted)
            asked.scratch = self._scratch.data_ptr()


def _layer(layer: PackedLayer, kv: KvLayer) -> _Layer:
    norms = layer.head_norms
    return _Layer(
        *(weight_struct(weight) for weight in (layer.qkv, layer.output, layer.gate_up, layer.down)),
        *pointers(layer.norms),
        pointer(None if norms is None else norms.query),
        pointer(None if norms is None else norms.key),
        scoring_struct(layer.scoring),
        *pointers((kv.data, kv.scales)),
        layer.table,
        layer.norms_are_whole,
        layer.gate,
    )


def runs_natively(decoder: NativeDecoder, kv: KvPages) -> bool:
    layer = kv.layer(0)
    query = torch.empty(0, decoder.heads, kv.head_dim)
    return (
        native_library() is not None
        and kv.device.type == "cpu"
        and attends(query, layer)
        and layer.kv_heads * 2 + decoder.heads == decoder.layers[0].qkv.outputs // kv.head_dim
    )
