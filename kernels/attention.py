"""Attention over paged KV: one new token of each of many sequences, and a chunk of one sequence."""

import torch

from baton.kernels.dispatch import pick
from baton.kernels.native.library import attends
from baton.kernels.types import KvLayer, Scoring, check_index, check_kv, check_scoring


def paged_decode(
    query: torch.Tensor,
    kv: KvLayer,
    block_ids: torch.Tensor,
    block_starts: torch.Tensor,
    context_tokens: torch.Tensor,
    scoring: Scoring,
    usual_tokens: int | None = None,
) -> torch.Tensor:
    """Attention of each sequence's last token, the one at position `context_tokens - 1`; a new tensor like `query`.

    query: `[sequences, heads, head_dim]`; kv: one layer of the pool, of the same dtype or quantised, that holds the KV
    of the whole context already. The blocks of sequence s, in order of position, are `block_ids[block_starts[s] :
    block_starts[s + 1]]`, exactly `ceil(context_tokens[s] / block_tokens)` of them and at least one; block_ids: int64
    `[used_blocks]`, block_starts: int64 `[sequences + 1]`, context_tokens: int64 `[sequences]`. Softmax is in float32.
    No sequence's result depends on its neighbours.

    A sequence whose `context_tokens` is 0 pads a batch: it has no blocks, and zeros as its result. `block_ids` may be
    longer than what is used; `usual_tokens`, a hint, says how long contexts are where its length does not tell.
    """
    sequences = query.shape[0]
    check_kv(kv, query)
    check_scoring(scoring, query)
    check_index("block_ids", block_ids)
    check_index("block_starts", block_starts, sequences + 1)
    check_index("context_tokens", context_tokens, sequences)
    compute = pick("paged_decode", query, attends(query, kv))
    attended: torch.Tensor = compute(query, kv, block_ids, block_starts, context_tokens, scoring, usual_tokens)
    return attended


def paged_prefill(
    query: torch.Tensor, kv: KvLayer, block_ids: torch.Tensor, start: int, scoring: Scoring
) -> torch.Tensor:
    """Causal attention of tokens at positions `[start, start + tokens)`; a new tensor like `query`.

    query: `[tokens, heads, head_dim]`; kv: one layer of the pool, of the same dtype or quantised, that holds KV of
    positions `[0, start + tokens)` already; block_ids: int64 `[ceil((start + tokens) / block_tokens)]`, the blocks in
    order of position. Softmax is in float32.
    """
    check_kv(kv, query)
    check_scoring(scoring, query)
    check_index("block_ids", block_ids, -(-(start + query.shape[0]) // kv.block_tokens))
    compute = pick("paged_prefill", query, attends(query, kv))
    attended: torch.Tensor = compute(query, kv, block_ids, start, scoring)
    return attended
