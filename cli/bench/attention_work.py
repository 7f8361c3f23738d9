"""Paged KV of random numbers, attention over it by our kernels, and by PyTorch over the same KV gathered."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.kv_layout import KV_DTYPES, KvLayout
from kernels.kv_pages import KvLayer
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill
from kernels.scoring import Scoring
from kernels.store_kv import store_kv

BLOCK_TOKENS = 32  # as `baton up` has them
COLD_BYTES = 64 << 20  # of KV, so that no cache holds it from one round to the next


@dataclass(frozen=True, slots=True)
class HeadShape:
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}x{self.head_dim}"


@dataclass(frozen=True, slots=True)
class Case:
    shape: HeadShape
    kv_dtype: str  # a key of KV_DTYPES
    batch: int
    context: int  # tokens of each sequence
    tokens: int  # of each that are computed: 1 is decode, else a chunk that ends the context

    @property
    def kv_bytes(self) -> int:
        """Read at least: keys, values and scales of all contexts, once."""
        return self.batch * self.context * self._layout(1).token_bytes

    @property
    def flop(self) -> int:
        """Of products with keys and with values that are seen."""
        seen = self.tokens * (self.context - self.tokens) + self.tokens * (self.tokens + 1) // 2
        return 4 * self.batch * self.shape.heads * self.shape.head_dim * seen

    def layers(self) -> int:
        """So many that the memory read by one round is cold; chunks read little for their computation."""
        return 1 if self.tokens > 1 else max(1, -(-COLD_BYTES // self.kv_bytes))

    def _layout(self, layers: int) -> KvLayout:
        return KvLayout(layers, self.shape.kv_heads, BLOCK_TOKENS, self.shape.head_dim, KV_DTYPES[self.kv_dtype])

    def make(self) -> "Rounds":
        """Shuffled blocks."""
        layers, blocks = self.layers(), -(-self.context // BLOCK_TOKENS)
        layout = self._layout(layers)
        kv = layout.view(torch.zeros(blocks * self.batch * layout.block_bytes, dtype=torch.uint8), blocks * self.batch)
        tables = torch.randperm(blocks * self.batch).view(self.batch, blocks)
        wide = torch.bfloat16 if self.kv_dtype == "bfloat16" else torch.float32
        dense: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index in range(layers):
            key, value = torch.randn(2, self.batch * self.context, self.shape.kv_heads, self.shape.head_dim, dtype=wide)
            positions = torch.arange(self.context)
            slots = (tables[:, positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS).flatten()
            store_kv(kv.layer(index), key, value, slots)
            shape = (self.batch, self.context, self.shape.kv_heads, self.shape.head_dim)
            gathered = [each.view(shape).transpose(1, 2).contiguous() for each in (key, value)]
            dense.append((gathered[0], gathered[1]))
        return Rounds(self, [kv.layer(index) for index in range(layers)], dense, tables, wide)


class Rounds:
    """Calls that go through all layers once; each takes the same queries."""

    def __init__(
        self,
        case: Case,
        layers: list[KvLayer],
        dense: list[tuple[torch.Tensor, torch.Tensor]],
        tables: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        self._case, self._layers, self._dense, self._tables = case, layers, dense, tables
        self._query = torch.randn(case.batch, case.tokens, case.shape.heads, case.shape.head_dim, dtype=dtype)
        self._scoring = Scoring(case.shape.head_dim**-0.5)
        hidden = torch.arange(case.context) > torch.arange(case.context - case.tokens, case.context)[:, None]
        self._visible = ~hidden

    def ours(self) -> Callable[[], object]:
        case, ids = self._case, self._tables.flatten()
        if case.tokens == 1:
            starts = torch.arange(0, len(ids) + 1, self._tables.shape[1])
            contexts, query = torch.full((case.batch,), case.context), self._query[:, 0]
            return lambda: [paged_decode(query, kv, ids, starts, contexts, self._scoring) for kv in self._layers]
        start = case.context - case.tokens
        return lambda: [
            paged_prefill(query, kv, table, start, self._scoring)
            for kv in self._layers
            for query, table in zip(self._query, self._tables, strict=True)
        ]

    def torchs(self) -> Callable[[], object]:
        """Uses `is_causal` instead of a mask where the chunk is the whole context: torch then reads no mask."""
        query, is_causal = self._query.transpose(1, 2), self._case.tokens == self._case.context > 1
        mask = None if is_causal or self._case.tokens == 1 else self._visible
        return lambda: [
            F.scaled_dot_product_attention(query, *pair, attn_mask=mask, is_causal=is_causal, enable_gqa=True)
            for pair in self._dense
        ]
