"""All layers of a decoder over one batch in one call, so that nothing stands between its operations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.kernels.native.decoder import DecoderCall
from baton.kernels.native.library import native_library
from baton.kernels.packed_weight import PackedWeight
from baton.kernels.pages import HeadNorms
from baton.kernels.types import KvPages, Scoring


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """Weights of norms are float32."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: PackedWeight
    head_norms: HeadNorms | None
    output: PackedWeight
    feed_forward_norm: torch.Tensor  # [hidden]
    gate_up: PackedWeight
    down: PackedWeight
    scoring: Scoring


@dataclass(frozen=True, slots=True)
class PackedDecoder:
    layers: tuple[PackedLayer, ...]
    heads: int
    eps: float  # of all norms


class DecodeRows(Protocol):
    """As in `paged_decode`."""

    @property
    def block_ids(self) -> torch.Tensor: ...

    @property
    def block_starts(self) -> torch.Tensor: ...

    @property
    def context_tokens(self) -> torch.Tensor: ...


class PrefillRows(Protocol):
    """As in `paged_prefill`."""

    @property
    def rows(self) -> slice: ...

    @property
    def start(self) -> int: ...

    @property
    def block_ids(self) -> torch.Tensor: ...


class PagedRows(Protocol):
    """Which sequences the rows belong to: single tokens first, then chunks."""

    @property
    def slots(self) -> torch.Tensor:
        """As in `store_kv`."""

    @property
    def decode(self) -> DecodeRows | None: ...

    @property
    def prefills(self) -> Sequence[PrefillRows]: ...


class DecoderLayers:
    """A decoder's layers with memory for what lies between them, over one pool. One call at a time."""

    def __init__(self, decoder: PackedDecoder, kv: KvPages) -> None:
        """Raises: ValueError where `runs_natively` is false."""
        native = native_library()
        if native is None or not runs_natively(decoder, kv):
            raise ValueError("no native kernel computes this decoder over these pages")
        self._call = DecoderCall(native.decoder, decoder, kv)

    def __call__(self, residual: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: PagedRows) -> None:
        """residual: float32 `[rows, hidden]`, contiguous: embedded tokens, and then what the last layer leaves.

        cos, sin: float32 `[rows, head_dim / 2]`. Keys and values of all rows go to their slots of the pool. No row's
        result depends on rows of other sequences.
        """
        self._call(residual, cos, sin, batch)


def runs_natively(decoder: PackedDecoder, kv: KvPages) -> bool:
    native = native_library()
    layer = kv.layer(0)
    query = torch.empty(0, decoder.heads, kv.head_dim)
    return (
        native is not None
        and kv.device.type == "cpu"
        and native.takes(query, layer)
        and native.layers.stores(layer)
        and layer.kv_heads * 2 + decoder.heads == decoder.layers[0].qkv.outputs // kv.head_dim
    )
