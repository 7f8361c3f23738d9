"""Decoder on a CPU: one native call computes all layers for a batch."""

import ctypes
from collections.abc import Callable
from ctypes import byref
from typing import NamedTuple

import torch
import torch.nn.functional as F

from baton.kernels.native.layers import PackedAttention, PackedLatent, PackedLayer, PackedRecurrent, layer_struct
from baton.kernels.native.library import (
    attends,
    native_library,
    native_threads,
    pages_struct,
    pointer,
    pointers,
    runs_struct,
)
from baton.kernels.native.structs import DecoderArgumentsStruct, DecoderLayerStruct, GroupRowsStruct, PrefillChunkStruct
from baton.kernels.packed_weight import PackedWeight
from baton.kernels.types import GroupRows, KvPages, PagedRows, PrefillChunks, StateRuns


class Embedded(NamedTuple):
    """Embedding of tokens: rows of `weight` times `scale`, in the model's dtype."""

    weight: torch.Tensor | PackedWeight  # [vocab, hidden], any float dtype, or packed in a float format
    scale: float
    dtype: torch.dtype


class NativeDecoder:
    """Decoder of one model, which can compute over any KV pool. Not thread-safe.

    Structs that describe weights and pages are rebuilt when the pool changes, structs that describe rows in every step.
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
        """Prepare the decoder. norm: `[hidden]`, weight of the norm before the head; eps: added in every norm.

        head: None if the head is not packed. Raises: ValueError without native kernels.
        """
        native = native_library()
        if native is None:
            raise ValueError("native kernels are not built; run python -m baton.kernels.native.build")
        self._native = native
        self.layers, self.heads, self.head = layers, heads, head
        self._eps, self._embedding, self._norm = eps, embedding, norm
        self._pool: KvPages | None = None  # pool for which the structs are built: they borrow its memory
        self._runs = False

    def takes(self, kv: KvPages) -> bool:
        """Build the structs for pool `kv`; return whether native kernels can compute over this pool."""
        if kv is not self._pool:
            self._pool, self._runs = kv, runs_natively(self, kv)
            if self._runs:
                self._prepare(kv)
        return self._runs

    def hidden(
        self,
        batch: PagedRows,
        cos: torch.Tensor,
        sin: torch.Tensor,
        runs: StateRuns | None,
        on_layers_start: Callable[[], None],
    ) -> torch.Tensor:
        """Compute the last layer's output, float32 `[rows, hidden]`, over the pool last passed to `takes`.

        Also stores KV of all rows in the pool. cos, sin: float32 `[tables, rows, angles]`, see `rotary`. runs: rows for
        layers with a recurrent state; None without such layers. on_layers_start: called once, just before the
        native call. No row's result depends on other sequences. Raises: IndexError for a token outside the vocabulary.
        """
        residual, decode = self._embedded(batch.token_ids), batch.groups[0].decode
        arguments, rows = self._arguments, len(residual)
        arguments.threads = native_threads()
        arguments.rows, arguments.rotary_dim = rows, 2 * cos.shape[2]
        arguments.residual, arguments.cos, arguments.sin = pointers((residual, cos, sin))
        arguments.decode_rows = 0 if decode is None else len(decode.context_tokens)
        if decode is not None:
            arguments.context_tokens = decode.context_tokens.data_ptr()
        kept = [_chunks(group.prefills) for group in batch.groups]
        groups = (GroupRowsStruct * len(kept))(*map(_group, batch.groups, kept))
        arguments.groups, arguments.chunk_count = ctypes.addressof(groups), len(kept[0])
        if runs is not None:
            arguments.runs = runs_struct(runs)
        on_layers_start()
        self._native.decoder_layers(byref(arguments))
        return residual

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute float32 logits `[rows, vocab]` of rows that `hidden` returned. Raises: ValueError without a head."""
        if self.head is None:
            raise ValueError("the head is not packed")
        return self._native.packed_linear(self._native.rms_norm(hidden, self._norm, self._eps), self.head)

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of the tokens: new float32 `[tokens, hidden]`."""
        weight, scale, dtype = self._embedding
        if isinstance(weight, PackedWeight):
            rows = self._native.gather_rows(token_ids, weight)
        else:
            rows = F.embedding(token_ids, weight)
        return (rows if scale == 1.0 else rows.to(dtype) * scale).float()

    def _prepare(self, kv: KvPages) -> None:
        self._structs = (DecoderLayerStruct * len(self.layers))(*(layer_struct(layer, kv) for layer in self.layers))
        states = kv.states
        self._arguments = DecoderArgumentsStruct(
            layers=ctypes.addressof(self._structs),
            pages=pages_struct(kv.layer(0)),
            states=pointer(states),
            state_stride=0 if states is None else states.stride(0),
            layer_count=len(self.layers),
            hidden=len(self._norm),
            heads=self.heads,
            kv_heads=kv.kv_heads,
            head_dim=kv.head_dim,
            eps=self._eps,
        )


def _chunks(prefills: PrefillChunks | None) -> "ctypes.Array[PrefillChunkStruct]":
    """Build the structs of prompt chunks. They borrow the memory of `prefills`."""
    rows = () if prefills is None else prefills.chunks
    chunks = (PrefillChunkStruct * len(rows))()
    for chunk, each in zip(chunks, rows, strict=True):
        chunk.block_ids, chunk.start = each.block_ids.data_ptr(), each.start
        chunk.first_row, chunk.tokens = each.rows.start, each.rows.stop - each.rows.start
    return chunks


def _group(rows: GroupRows, chunks: "ctypes.Array[PrefillChunkStruct]") -> GroupRowsStruct:
    """Build the struct of a layer group's rows. It borrows the memory of both arguments."""
    made = GroupRowsStruct(slots=rows.slots.data_ptr(), chunks=ctypes.addressof(chunks))
    if rows.decode is not None:
        made.block_ids = rows.decode.block_ids.data_ptr()
        made.block_starts = rows.decode.block_starts.data_ptr()
    return made


def runs_natively(decoder: NativeDecoder, kv: KvPages) -> bool:
    mixings = [layer.mixer.mixing for layer in decoder.layers if layer.mixer is not None]
    has_states = kv.states is not None or not any(isinstance(each, PackedRecurrent) for each in mixings)
    return (
        native_library() is not None
        and kv.device.type == "cpu"
        and has_states
        and all(_attends(decoder, layer, kv) for layer in decoder.layers)
    )


def _attends(decoder: NativeDecoder, layer: PackedLayer, kv: KvPages) -> bool:
    """Return whether native kernels can compute attention of this layer, with all KV heads of the pool."""
    mixing = None if layer.mixer is None else layer.mixer.mixing
    if layer.mixer is None or not isinstance(mixing, PackedAttention | PackedLatent):
        return True
    query, own = torch.empty(0, decoder.heads, kv.head_dim), kv.layer(mixing.place)
    if isinstance(mixing, PackedLatent):
        return attends(query, own.shared_by(mixing.groups))
    of_queries = decoder.heads * (2 if mixing.is_gated else 1)
    return attends(query, own) and (2 * own.kv_heads + of_queries) * kv.head_dim == layer.mixer.qkv.outputs
