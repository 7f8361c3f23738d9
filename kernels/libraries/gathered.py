"""Attention of a prompt chunk by PyTorch's kernels, over a contiguous copy of the context's keys and values.

The copy costs time in each layer, but allows kernels that are tuned for each GPU (FlashAttention, cuDNN).
engine/runner/prefill_attention.py measures which is faster.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from baton.kernels.types import KvLayer, Scoring, check_index, check_kv, check_scoring


def library_takes(kv: KvLayer, scoring: Scoring) -> bool:
    """Return whether all libraries support this attention: plain scores, no window, unquantised keys and values."""
    return scoring.is_plain and scoring.window is None and kv.scales is None and kv.value_prefix is None


def is_fast_gathered(heads: int, kv: KvLayer) -> bool:
    """Return whether PyTorch has a fast kernel for this device. Its slow kernel writes all scores to memory.

    Also imports the module that `gathered_prefill` needs, so that the first call is not slow.
    """
    if not kv.data.is_cuda:
        return True
    _seen(1, 2)
    query, key = (kv.data.new_empty(1, count, 16, kv.head_dim) for count in (heads, kv.kv_heads))
    return can_use_flash_attention(SDPAParams(query, key, key, None, 0.0, False, True))


def gathered_prefill(
    query: torch.Tensor, kv: KvLayer, block_ids: torch.Tensor, start: int, scoring: Scoring
) -> torch.Tensor:
    """Compute `paged_prefill` of kernels/attention.py if `library_takes` holds; returns `[tokens, heads, head_dim]`.

    Allocates the keys and values of the complete context. Raises: ValueError.
    """
    tokens = len(query)
    end = start + tokens
    check_kv(kv, query)
    check_scoring(scoring, query)
    check_index("block_ids", block_ids, -(-end // kv.block_tokens))
    if not library_takes(kv, scoring):
        raise ValueError(
            "gathered attention does not support softcap, sinks, windows or quantised KV; use paged_prefill"
        )
    # [2, 1, kv_heads, end, head_dim], copied once; unused slots of the last block are cut off
    keys, values = kv.data.permute(1, 2, 0, 3, 4).index_select(2, block_ids).flatten(2, 3)[:, None, :, :end]
    asked, is_whole = query.transpose(0, 1)[None], start == 0
    mask = None if is_whole else _seen(tokens, end)
    attended = F.scaled_dot_product_attention(
        asked, keys, values, attn_mask=mask, is_causal=is_whole, scale=scoring.scale, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


def _seen(tokens: int, end: int) -> torch.Tensor:
    """Return the causal mask for the last `tokens` of `end` positions, an object that needs no memory on a GPU."""
    from torch.nn.attention.bias import causal_lower_right  # slow to import, and rarely needed

    return cast(torch.Tensor, causal_lower_right(tokens, end))
