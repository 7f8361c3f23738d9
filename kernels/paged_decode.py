"""Attention of one new token of each of many sequences over their paged KV."""

import torch

from kernels import reference
from kernels.check import check_dtype, check_index, check_shape


def paged_decode(
    query: torch.Tensor,
    kv: torch.Tensor,
    block_ids: torch.Tensor,
    block_starts: torch.Tensor,
    context_tokens: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attention of each sequence's last token, the one at position `context_tokens - 1`; a new tensor like `query`.

    query: `[sequences, heads, head_dim]`; kv: one layer of the pool, of the same dtype, that holds the KV of the whole
    context already. The blocks of sequence s, in order of position, are `block_ids[block_starts[s] : block_starts[s +
    1]]`, exactly `ceil(context_tokens[s] / block_tokens)` of them and at least one; block_ids: int64 `[used_blocks]`,
    block_starts: int64 `[sequences + 1]`, context_tokens: int64 `[sequences]`. With a window, the query sees the last
    `window` tokens of its context. Softmax is in float32. No sequence's result depends on its neighbours.
    """
    sequences = query.shape[0]
    check_shape("query", query, None, None, None)
    check_shape("kv", kv, None, 2, None, None, query.shape[2])
    check_dtype("kv", kv, query.dtype)
    if query.shape[1] % kv.shape[2]:
        raise ValueError(f"{query.shape[1]} heads are not a multiple of {kv.shape[2]} KV heads")
    check_index("block_ids", block_ids)
    check_index("block_starts", block_starts, sequences + 1)
    check_index("context_tokens", context_tokens, sequences)
    return reference.paged_decode(query, kv, block_ids, block_starts, context_tokens, scale, window)
