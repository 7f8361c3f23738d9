"""Rows that pad a batch: they read nothing, write nothing, and change nothing of the others. Also in native kernels."""

import pytest
import torch

from baton.kernels.attention import paged_decode
from baton.kernels.pages import rotate_and_store, store_kv
from baton.kernels.types import DecodeRows, KvLayer, KvPages, Scoring

HEADS, KV_HEADS, BLOCK_TOKENS, BLOCKS = 4, 2, 8, 5
HEAD_DIMS = [24, 32]  # the reference takes the one, native kernels the other
NOTHING = torch.empty(0, dtype=torch.int64)


def poisoned(head_dim: int, dtype: torch.dtype = torch.float32) -> KvLayer:
    data = torch.full((BLOCKS, 1, 2, KV_HEADS, BLOCK_TOKENS, head_dim), torch.nan).to(dtype)
    scales = None if dtype == torch.float32 else torch.full(data.shape[:-1], torch.nan)
    return KvPages(data, scales).layer(0)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_negative_slot_writes_nothing(head_dim: int, dtype: torch.dtype) -> None:
    slots, angles = torch.tensor([-1, 9, -1]), torch.rand(3, head_dim // 2)
    qkv = torch.randn(3, HEADS + 2 * KV_HEADS, head_dim)
    alone, padded, stored = (poisoned(head_dim, dtype) for _ in range(3))
    for layer, rows in ((alone, slice(1, 2)), (padded, slice(0, 3))):
        query = rotate_and_store(qkv[rows].clone(), angles[rows], angles[rows], None, layer, slots[rows])
        assert query.isfinite().all()
    assert alone.data.view(torch.uint8).equal(padded.data.view(torch.uint8))
    key, value = torch.randn(2, 3, KV_HEADS, head_dim)
    store_kv(stored, key, value, torch.tensor([-1, -1, -1]))
    assert stored.data.view(torch.uint8).equal(poisoned(head_dim, dtype).data.view(torch.uint8))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_row_without_context_is_zero_and_changes_no_other(head_dim: int) -> None:
    layer, query = poisoned(head_dim), torch.randn(4, HEADS, head_dim)
    layer.data[3] = torch.randn(2, KV_HEADS, BLOCK_TOKENS, head_dim)
    layer.data[1] = torch.randn(2, KV_HEADS, BLOCK_TOKENS, head_dim)
    scoring = Scoring(head_dim**-0.5)
    unused = torch.full((6,), 4)  # a block of NaN
    ids = torch.cat((torch.tensor([3, 1]), unused))
    padded = paged_decode(
        query, layer, DecodeRows(ids, torch.tensor([0, 0, 2, 2, 2]), torch.tensor([0, 13, 0, 0])), scoring
    )
    alone = paged_decode(query[1:2], layer, DecodeRows(ids[:2], torch.tensor([0, 2]), torch.tensor([13])), scoring)
    assert padded[1].equal(alone[0])
    assert not padded[[0, 2, 3]].any()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_batch_of_nothing_but_padding_is_zeros(head_dim: int) -> None:
    query = torch.randn(2, HEADS, head_dim)
    starts, contexts = torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    assert not paged_decode(query, poisoned(head_dim), DecodeRows(NOTHING, starts, contexts), Scoring(1.0)).any()
