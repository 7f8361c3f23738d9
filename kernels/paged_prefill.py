"""Attention of a chunk of one sequence over its paged KV."""

import torch

from kernels import reference
from kernels.check import check_dtype, check_index, check_shape


def paged_prefill(
    query: torch.Tensor, kv: torch.Tensor, block_ids: torch.Tensor, start: int, scale: float, window: int | None
) -> torch.Tensor:
    """Causal attention of tokens at positions `[start, start + tokens)`; a new tensor like `query`.

    query: `[tokens, heads, head_dim]`; kv: one layer of the pool, of the same dtype, that holds KV of positions
    `[0, start + tokens)` already; block_ids: int64 `[ceil((start + tokens) / block_tokens)]`, the blocks in order of
    position. With a window, a query at position p sees positions `(p - window, p]`. Softmax is in float32.
    """
    check_shape("kv", kv, None, 2, None, None, query.shape[2])
    check_shape("query", query, None, None, None)
    check_dtype("kv", kv, query.dtype)
    if query.shape[1] % kv.shape[2]:
        raise ValueError(f"{query.shape[1]} heads are not a multiple of {kv.shape[2]} KV heads")
    check_index("block_ids", block_ids, -(-(start + query.shape[0]) // kv.shape[3]))
    return reference.paged_prefill(query, kv, block_ids, start, scale, window)
