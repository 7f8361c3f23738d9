"""Attention of a chunk of one sequence over its paged KV."""

import torch

from kernels import reference
from kernels.check import check_index
from kernels.kv_pages import KvLayer, check_kv
from kernels.native.library import native_library
from kernels.on_triton import triton_kernels
from kernels.scoring import Scoring, check_scoring


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
    if (kernels := triton_kernels(query)) is not None:
        attended: torch.Tensor = kernels.paged_prefill(query, kv, block_ids, start, scoring)
        return attended
    native = native_library()
    if native is not None and native.takes(query, kv):
        return native.paged_prefill(query, kv, block_ids, start, scoring)
    return reference.paged_prefill(query, kv, block_ids, start, scoring)
