"""Attention of a step's tokens over the KV pool: decode rows and prompt chunks together."""

import torch

from baton.kernels.attention import paged_decode, paged_prefills
from baton.kernels.pages import store_kv
from baton.kernels.types import GroupRows, KvLayer, Scoring


def store_and_attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: GroupRows, kv: KvLayer, scoring: Scoring
) -> torch.Tensor:
    """Write the keys and values of a step's tokens, then compute attention; return a new tensor shaped like `query`.

    query: `[tokens, heads, head_dim]`; key, value: `[tokens, kv_heads, head_dim]`, rotated if the model rotates.
    """
    store_kv(kv, key, value, rows.slots)
    return attend(query, rows, kv, scoring)


def attend(query: torch.Tensor, rows: GroupRows, kv: KvLayer, scoring: Scoring) -> torch.Tensor:
    """Compute attention of tokens whose KV is already in `kv`; return `[tokens, heads, value_dim]`."""
    if (decode := rows.decode) and not rows.prefills:
        return paged_decode(query, kv, decode, scoring)
    query = query.contiguous()
    attended, alone = query.new_empty(*query.shape[:2], kv.value_dim), 0
    if decode:
        alone = len(decode.context_tokens)
        paged_decode(query[:alone], kv, decode, scoring, attended[:alone])
    if rows.prefills is not None:
        paged_prefills(query[alone:], kv, rows.prefills, scoring, attended[alone:])
    return attended
