"""The native decoder as Python calls it: structs of weights and pages are made once, those of rows at every step."""

import ctypes
from ctypes import POINTER, Array, Structure, c_float, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch

from baton.kernels.native.structs import (
    PagesStruct,
    ScoringStruct,
    WeightStruct,
    pages_struct,
    pointer,
    pointers,
    scoring_struct,
    weight_struct,
)
from baton.kernels.native.threads import native_threads
from baton.kernels.types import KvLayer, KvPages

if TYPE_CHECKING:
    from baton.kernels.decoder import PackedDecoder, PackedLayer, PagedRows


MOST_PIECES = 16  # of one sequence's context; as in kernels/native/arguments.h


class _Layer(Structure):
    _fields_ = (
        *((name, WeightStruct) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "feed_forward_norm", "query_norm", "key_norm")),
        ("scoring", ScoringStruct),
        *((name, c_void_p) for name in ("pages", "scales")),
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
        *((name, c_int64) for name in ("hidden", "inner", "heads", "kv_heads", "head_dim")),
        ("eps", c_float),
        ("threads", c_int32),
    )


class NativeDecoder:
    def __init__(self, library: ctypes.CDLL) -> None:
        self.run = library.baton_decoder_layers
        self.run.argtypes, self.run.restype = (POINTER(_Arguments),), None


class DecoderCall:
    """Keeps alive what its structs point at. `scratch` grows with the largest batch."""

    def __init__(self, native: NativeDecoder, decoder: "PackedDecoder", kv: KvPages) -> None:
        self._run = native.run
        self._borrowed = (decoder, kv)
        self._layers = _layers(decoder, kv)
        self._scratch = torch.empty(0)
        first = decoder.layers[0]
        self._arguments = _Arguments(
            layers=ctypes.addressof(self._layers),
            pages=pages_struct(kv.layer(0)),
            layer_count=len(decoder.layers),
            hidden=first.output.outputs,
            inner=first.down.inputs,
            heads=decoder.heads,
            kv_heads=kv.kv_heads,
            head_dim=kv.head_dim,
            eps=decoder.eps,
        )

    def __call__(self, residual: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: "PagedRows") -> None:
        arguments, rows, decode = self._arguments, len(residual), batch.decode
        arguments.threads = native_threads()
        arguments.rows = rows
        arguments.residual, arguments.cos, arguments.sin = pointers((residual, cos, sin))
        arguments.slots = batch.slots.data_ptr()
        decode_rows = arguments.decode_rows = 0 if decode is None else len(decode.context_tokens)
        if decode is not None:
            arguments.block_ids = decode.block_ids.data_ptr()
            arguments.block_starts = decode.block_starts.data_ptr()
            arguments.context_tokens = decode.context_tokens.data_ptr()
        chunks = (_Chunk * len(batch.prefills))()
        for chunk, each in zip(chunks, batch.prefills, strict=True):
            chunk.block_ids, chunk.start = each.block_ids.data_ptr(), each.start
            chunk.first_row, chunk.tokens = each.rows.start, each.rows.stop - each.rows.start
        arguments.chunks, arguments.chunk_count = ctypes.addressof(chunks), len(chunks)
        self._reserve(rows, decode_rows * MOST_PIECES)
        self._run(arguments)

    def _reserve(self, rows: int, parts: int) -> None:
        """Memory for what decoder.cpp takes from it."""
        asked = self._arguments
        heads_size, kv_size = asked.heads * asked.head_dim, asked.kv_heads * asked.head_dim
        of_row = asked.hidden + 3 * heads_size + 2 * kv_size + asked.inner
        wanted = rows * of_row + parts * asked.heads * (asked.head_dim + 2)
        if wanted > len(self._scratch):
            self._scratch = torch.empty(wanted)
            asked.scratch = self._scratch.data_ptr()


def _layers(decoder: "PackedDecoder", kv: KvPages) -> "Array[_Layer]":
    return (_Layer * len(decoder.layers))(
        *(_layer(layer, kv.layer(index)) for index, layer in enumerate(decoder.layers))
    )


def _layer(layer: "PackedLayer", kv: KvLayer) -> _Layer:
    norms = layer.head_norms
    return _Layer(
        *(weight_struct(weight) for weight in (layer.qkv, layer.output, layer.gate_up, layer.down)),
        *pointers((layer.attention_norm, layer.feed_forward_norm)),
        pointer(None if norms is None else norms.query),
        pointer(None if norms is None else norms.key),
        scoring_struct(layer.scoring),
        *pointers((kv.data, kv.scales)),
    )
