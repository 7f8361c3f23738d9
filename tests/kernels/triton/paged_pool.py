"""A poisoned pool of any format, filled number by number, and attention over it in float64."""

import random

import torch

from baton.engine.kv_cache.layout import KvLayout
from baton.kernels.types import KvLayer, KvPages, Scoring, dequantise, quantise

POISON = 0xFF  # NaN in every float, and as a scale


class PagedPool:
    """The middle one of three layers; blocks are handed out in a shuffled order."""

    def __init__(
        self,
        dtype: torch.dtype,
        kv_heads: int,
        block_tokens: int,
        head_dim: int,
        blocks: int = 40,
        value_prefix: int | None = None,
    ) -> None:
        layout = KvLayout(3, kv_heads, block_tokens, head_dim, dtype, value_prefix)
        self.raw = torch.full((blocks * layout.block_bytes,), POISON, dtype=torch.uint8)
        self.pages: KvPages = layout.view(self.raw, blocks)
        self.layer: KvLayer = self.pages.layer(1)
        self._free = list(range(blocks))
        random.Random(0).shuffle(self._free)

    def store(self, tokens: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """Blocks, and the keys and values as they are stored, float64 `[tokens, kv_heads, their size]`."""
        layer = self.layer
        block_tokens, dtype = layer.block_tokens, layer.data.dtype
        blocks = [self._free.pop() for _ in range(-(-tokens // block_tokens))]
        stored = []
        for part in range(layer.kinds):
            numbers = torch.randn(tokens, layer.kv_heads, layer.head_dim)
            scales = torch.ones(tokens, layer.kv_heads)
            kept = numbers.to(dtype)
            if layer.scales is not None:
                kept, scales = quantise(numbers, dtype)
            for position in range(tokens):
                block, offset = blocks[position // block_tokens], position % block_tokens
                layer.data[block, part, :, offset] = kept[position]
                if layer.scales is not None:
                    layer.scales[block, part, :, offset] = scales[position]
            stored.append(dequantise(kept, scales, torch.float64))
        return blocks, stored[0], stored[-1][..., : layer.value_dim]


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, scoring: Scoring
) -> torch.Tensor:
    """Float64 `[tokens, heads, size of a value]` of tokens from position `start` on."""
    group = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    distance = torch.arange(len(key)) - torch.arange(start, start + len(query))[:, None]
    hidden = distance > 0
    if scoring.window is not None:
        hidden |= distance <= -scoring.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if scoring.sinks is not None:
        sinks = scoring.sinks.double()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat((scores, sinks), dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(key)], value)
