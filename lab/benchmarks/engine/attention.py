"""`baton bench attention`: the attention kernels alone, beside this machine's limits and PyTorch's attention."""

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from baton.engine.kv_cache.layout import KV_DTYPES, KvLayout
from baton.kernels.attention import paged_decode, paged_prefill
from baton.kernels.pages import store_kv
from baton.kernels.types import DecodeRows, KvLayer, Scoring
from baton.lab.benchmarks.report.limits import Limits, measure_limits, seconds_of
from baton.lab.benchmarks.report.result import Columns, show

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
            rows, query = DecodeRows(ids, starts, torch.full((case.batch,), case.context)), self._query[:, 0]
            return lambda: [paged_decode(query, kv, rows, self._scoring) for kv in self._layers]
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


ROUNDS = 7


@dataclass(frozen=True, slots=True)
class AttentionBenchOptions:
    shapes: tuple[HeadShape, ...]
    kv_dtypes: tuple[str, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    chunk_tokens: int  # of prefill, at the end of each context; 0: no prefill
    threads: int


@dataclass(frozen=True, slots=True)
class AttentionSpeed:
    """Medians of interleaved rounds. Of decode the share of the limit is that of reading, of prefill of computing.

    `times_torch`: PyTorch's scaled_dot_product_attention over the same KV, gathered and not quantised, takes so many
    times as long.
    """

    shape: str
    kv_dtype: str
    phase: str  # decode, prefill
    batch: int
    context: int
    tokens: int  # of each sequence
    threads: int
    took_ms: float  # of one layer
    gb_per_s: float
    gflop_per_s: float
    of_limit: float
    times_torch: float
    limit_read_gb_per_s: float
    limit_gflop_per_s: float


COLUMNS: Columns[AttentionSpeed] = {
    "heads": lambda speed: speed.shape,
    "KV": lambda speed: speed.kv_dtype,
    "phase": lambda speed: speed.phase,
    "batch": lambda speed: speed.batch,
    "context": lambda speed: speed.context,
    "tokens": lambda speed: speed.tokens,
    "ms/layer": lambda speed: f"{speed.took_ms:.3f}",
    "GB/s": lambda speed: f"{speed.gb_per_s:.1f}",
    "GFLOP/s": lambda speed: f"{speed.gflop_per_s:.1f}",
    "of limit": lambda speed: f"{speed.of_limit:.0%}",
    "x torch": lambda speed: f"{speed.times_torch:.2f}",
}


def run_attention_bench(options: AttentionBenchOptions, as_json: bool) -> int:
    torch.set_num_threads(options.threads)
    limits = measure_limits(torch.float32)
    with torch.inference_mode():
        speeds = [measure(case, limits) for case in cases_of(options)]
    show(speeds, as_json, COLUMNS, f"{options.threads} threads; {limits}")
    return 0


def cases_of(options: AttentionBenchOptions) -> list[Case]:
    """Decode of every batch; chunks of one sequence."""
    found: list[Case] = []
    for shape, dtype in itertools.product(options.shapes, options.kv_dtypes):
        found += [
            Case(shape, dtype, *sizes, tokens=1) for sizes in itertools.product(options.batches, options.contexts)
        ]
        if options.chunk_tokens:
            chunks = [(context, min(context, options.chunk_tokens)) for context in options.contexts]
            found += [Case(shape, dtype, 1, context, tokens) for context, tokens in chunks if tokens > 1]
    return found


def measure(case: Case, limits: Limits) -> AttentionSpeed:
    rounds, layers = case.make(), case.layers()
    ours, torchs = rounds.ours(), rounds.torchs()
    pairs = [(seconds_of(ours), seconds_of(torchs)) for _ in range(ROUNDS + 1)][1:]  # the first ones allocate
    took_s = statistics.median(pair[0] for pair in pairs) / layers
    is_decode = case.tokens == 1
    limit_s = case.kv_bytes / limits.read_bytes_per_s if is_decode else case.flop / limits.flop_per_s
    return AttentionSpeed(
        shape=str(case.shape),
        kv_dtype=case.kv_dtype,
        phase="decode" if is_decode else "prefill",
        batch=case.batch,
        context=case.context,
        tokens=case.tokens,
        threads=torch.get_num_threads(),
        took_ms=round(took_s * 1e3, 3),
        gb_per_s=round(case.kv_bytes / took_s / 1e9, 2),
        gflop_per_s=round(case.flop / took_s / 1e9, 1),
        of_limit=round(limit_s / took_s, 3),
        times_torch=round(statistics.median(torch_s / own_s for own_s, torch_s in pairs), 2),
        limit_read_gb_per_s=limits.read_gb_per_s,
        limit_gflop_per_s=limits.gflop_per_s,
    )
