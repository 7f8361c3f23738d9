"""One layer's attention of all chunks of a batch: the only place that looks at which sequence a token belongs to."""

import torch

from baton.engine.models.batch import Batch, DecodeRows
from baton.kernels.attention import paged_decode, paged_prefill
from baton.kernels.pages import store_kv
from baton.kernels.types import KvLayer, Scoring


def store_and_attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Batch, kv: KvLayer, scoring: Scoring
) -> torch.Tensor:
    """Writes the keys and values of the batch's tokens into `kv`, then lets them attend; a new tensor like `query`.

    query: `[tokens, heads, head_dim]`; key, value: `[tokens, kv_heads, head_dim]`, rotated where the model rotates.
    """
    store_kv(kv, key, value, batch.slots)
    return attend(query, batch, kv, scoring)


def attend(query: torch.Tensor, batch: Batch, kv: KvLayer, scoring: Scoring) -> torch.Tensor:
    """Of tokens whose keys and values are in `kv` already; a new tensor like `query`, `[tokens, heads, head_dim]`."""
    if (decode := batch.decode) and not batch.prefills:
        return _decode(query, decode, kv, scoring)
    attended = torch.empty_like(query)
    if decode:
        rows = slice(0, len(decode.context_tokens))
        attended[rows] = _decode(query[rows], decode, kv, scoring)
    for prefill in batch.prefills:
        attended[prefill.rows] = paged_prefill(query[prefill.rows], kv, prefill.block_ids, prefill.start, scoring)
    return attended


def _decode(query: torch.Tensor, decode: DecodeRows, kv: KvLayer, scoring: Scoring) -> torch.Tensor:
    return paged_decode(
        query, kv, decode.block_ids, decode.block_starts, decode.context_tokens, scoring, decode.usual_tokens
    )
