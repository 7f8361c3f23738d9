"""Rows of the GPU table: attention kernels and copies of KV blocks, at the shape of Llama-3.1-8B in bf16."""

from dataclasses import dataclass

import torch

from baton.engine.kv_cache.layout import KvLayout
from baton.kernels.attention import paged_decode, paged_prefills
from baton.kernels.libraries.gathered import gathered_prefill
from baton.kernels.pages import gather_blocks, scatter_blocks
from baton.kernels.types import DecodeRows, KvPages, PrefillChunks, Scoring
from baton.lab.benchmarks.gpu.row import (
    Bound,
    Figure,
    GpuRow,
    Setting,
    at_least,
    at_most,
    said_copy,
    said_products,
    seconds,
    seconds_each,
)

HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 32, 8, 128, 32
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 2  # keys and values of one token in one layer
SCORING = Scoring(HEAD_DIM**-0.5)
COLD_BYTES = 256 << 20  # larger than every cache
ROW_BYTES, LEAST_LAYERS = 1 << 30, 4  # minimum bytes and layers of a recorded graph, to make its launch time negligible


@dataclass(frozen=True, slots=True)
class Contexts:
    """Sequences of equal length, whose blocks are in random order in a pool of several layers."""

    kv: KvPages
    query: torch.Tensor
    rows: DecodeRows

    def decode(self, layer: int) -> torch.Tensor:
        kv = self.kv.layer(layer)
        return paged_decode(self.query, kv, self.rows, SCORING)


def contexts(sequences: int, tokens: int, layers: int, setting: Setting) -> Contexts:
    """Create contexts. `tokens`: a multiple of BLOCK_TOKENS."""
    device, each = setting.device, tokens // BLOCK_TOKENS
    return Contexts(
        random_pool(sequences * each, layers, setting),
        torch.randn(sequences, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device),
        DecodeRows(
            torch.randperm(sequences * each, device=device),
            torch.arange(sequences + 1, device=device) * each,
            torch.full((sequences,), tokens, device=device),
            tokens,
            torch.zeros(sequences * HEADS, dtype=torch.int32, device=device),  # like in a recorded step
        ),
    )


def random_pool(blocks: int, layers: int, setting: Setting) -> KvPages:
    layout = KvLayout(layers, KV_HEADS, BLOCK_TOKENS, HEAD_DIM, torch.bfloat16)
    numbers = torch.randn(blocks * layout.block_bytes // 2, dtype=torch.bfloat16, device=setting.device)
    return layout.view(numbers.view(torch.uint8), blocks)


def decode_layers(sequences: int, tokens: int) -> int:
    """Return a number of layers so large that each layer finds the GPU's cache cold."""
    return max(LEAST_LAYERS, -(-ROW_BYTES // (sequences * tokens * TOKEN_BYTES)))


def decode_seconds(sequences: int, tokens: int, setting: Setting) -> float:
    """Return the time of decode attention in one layer. Consecutive layers read different memory."""
    layers = setting.size(decode_layers(sequences, tokens), 2)
    asked = contexts(sequences, tokens, layers, setting)
    return seconds_each([lambda layer=layer: asked.decode(layer) for layer in range(layers)], setting)  # type: ignore[misc]


def decode_attention(setting: Setting) -> list[Figure]:
    sequences, tokens = setting.size((32, 4096), (2, 64))
    took_s = decode_seconds(sequences, tokens, setting)
    speed = sequences * tokens * TOKEN_BYTES / took_s
    alone = setting.size(8192, 64)
    alone_s = decode_seconds(1, alone, setting)
    limit, share = said_copy(setting, speed), said_copy(setting, alone * TOKEN_BYTES / alone_s)
    return [
        Figure("32 x 4096", speed / 1e12, "TB/s", at_least(3.6, Bound.MEMORY), limit),
        Figure("1 x 8192", alone_s * 1e6, "us", at_most(20, Bound.MEMORY), share),
    ]


def prefill_attention(setting: Setting) -> list[Figure]:
    tokens = setting.size(8192, 64)
    took_s = prefill_seconds(tokens, 0, 1, setting)
    flop = 4 * HEADS * HEAD_DIM * tokens * (tokens + 1) / 2
    speed = flop / took_s
    theirs_s = sdpa_seconds(tokens, setting)
    few, layers = setting.size((50, 32), (5, 2))
    behind_ms = prefill_seconds(few, tokens, layers, setting) * layers * 1e3
    limit, share = said_products(setting, speed), f"ours at {theirs_s / took_s:.2f} of its speed"
    return [
        Figure("8192, causal", speed / 1e12, "TFLOP/s", at_least(350, Bound.PRODUCTS), limit),
        Figure("torch's SDPA, gathered", flop / theirs_s / 1e12, "TFLOP/s", limit=share),
        Figure("50 behind 8192, 32 layers", behind_ms, "ms", at_most(1, Bound.MEMORY), said_copy(setting)),
    ]


def prefill_seconds(tokens: int, start: int, layers: int, setting: Setting) -> float:
    """Return the time of prefill attention in one layer, for new tokens after `start` cached ones."""
    blocks = -(-(start + tokens) // BLOCK_TOKENS)
    pool = random_pool(blocks, layers, setting)
    query = torch.randn(tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=setting.device)
    prefills = PrefillChunks.one(tokens, start, torch.randperm(blocks, device=setting.device))
    out = torch.empty_like(query)
    of_layers = [pool.layer(layer) for layer in range(layers)]
    calls = [lambda kv=kv: paged_prefills(query, kv, prefills, SCORING, out) for kv in of_layers]
    return seconds_each(calls * max(1, 2 // layers), setting)


def sdpa_seconds(tokens: int, setting: Setting) -> float:
    """Return the time of PyTorch's SDPA over keys and values gathered from the blocks."""
    pool = random_pool(tokens // BLOCK_TOKENS, 1, setting)
    query = torch.randn(tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=setting.device)
    block_ids = torch.randperm(tokens // BLOCK_TOKENS, device=setting.device)
    return seconds_each([lambda: gathered_prefill(query, pool.layer(0), block_ids, 0, SCORING)] * 2, setting)


def pages(setting: Setting) -> list[Figure]:
    """Measure gather and scatter of complete blocks, and of half their heads, as on one of two ranks."""
    blocks, layers = setting.size((1024, 32), (4, 2))
    pool = random_pool(blocks, layers, setting).data.view(torch.uint8)
    ids = torch.randperm(blocks, device=setting.device)[: blocks // 2]
    figures = []
    heads = pool.view(blocks, layers * 2, KV_HEADS, -1)
    for name, parts in (
        ("whole", pool.view(blocks, 1, -1)),
        ("half the heads", heads[:, :, : KV_HEADS // 2].flatten(2)),
    ):
        figures += _both_ways(name, parts, ids, setting)
    return figures


def _both_ways(name: str, blocks: torch.Tensor, ids: torch.Tensor, setting: Setting) -> list[Figure]:
    piece = torch.empty(len(ids), *blocks.shape[1:], dtype=torch.uint8, device=setting.device)
    other = torch.empty_like(piece)
    copy_s = seconds(lambda: other.copy_(piece), setting)
    limit = f"copy of as much {2 * piece.nbytes / copy_s / 1e12:.2f} TB/s"
    gather_s = seconds(lambda: gather_blocks(blocks, ids, piece), setting)
    scatter_s = seconds(lambda: scatter_blocks(piece, blocks, ids), setting)
    return [
        Figure(f"gather, {name}", copy_s / gather_s, "of copy", at_least(0.9), limit),
        Figure(f"scatter, {name}", copy_s / scatter_s, "of copy", at_least(0.9), limit),
    ]


ROWS = (
    GpuRow("decode_attention", decode_attention),
    GpuRow("prefill_attention", prefill_attention),
    GpuRow("pages", pages),
)
