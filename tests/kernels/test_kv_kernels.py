"""Kernels that write the pool: what they write, and that they write nothing else."""

import pytest
import torch

from baton.kernels.pages import copy_blocks, store_kv
from baton.kernels.types import KvPages

BLOCKS, KV_HEADS, BLOCK_TOKENS, HEAD_DIM = 7, 3, 5, 6


def poisoned_pool() -> torch.Tensor:
    return torch.full((BLOCKS, 2, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM), float("nan"))


def test_store_kv_writes_each_token_to_its_slot_and_nothing_else() -> None:
    pool = poisoned_pool()
    slots = [34, 0, 13, 6]
    key, value = torch.randn(2, len(slots), KV_HEADS, HEAD_DIM)
    store_kv(KvPages(pool).layer(1), key, value, torch.tensor(slots))
    for row, slot in enumerate(slots):
        stored = pool[slot // BLOCK_TOKENS, 1, :, :, slot % BLOCK_TOKENS]
        assert torch.equal(stored[0], key[row])
        assert torch.equal(stored[1], value[row])
    assert int(pool.isfinite().sum()) == key.numel() + value.numel()


def test_store_kv_takes_slices_of_a_fused_projection() -> None:
    pool = poisoned_pool()
    fused = torch.randn(2, 3 * KV_HEADS, HEAD_DIM)
    _, key, value = fused.split(KV_HEADS, dim=1)
    store_kv(KvPages(pool).layer(0), key, value, torch.tensor([1, 2]))
    assert torch.equal(pool[0, 0, 1, :, 2], value[1])


def test_store_kv_writes_only_keys_where_values_begin_with_them() -> None:
    pool = torch.full((BLOCKS, 2, 1, 1, BLOCK_TOKENS, HEAD_DIM), float("nan"))
    key, layer = torch.randn(2, 1, HEAD_DIM), KvPages(pool, None, 4).layer(1)
    store_kv(layer, key, None, torch.tensor([34, -1]))
    assert torch.equal(pool[6, 1, 0, :, 4], key[0])
    assert int(pool.isfinite().sum()) == HEAD_DIM
    with pytest.raises(ValueError, match="value must not be given"):
        store_kv(layer, key, key, torch.tensor([0, 1]))


def test_offsets_past_32_bits_are_right() -> None:
    """A pool of 2**31 elements and more, of which only the touched pages exist: nothing else is ever written."""
    blocks, width = 2**16 + 3, 2**14
    pool = torch.empty(blocks, 1, 2, 1, 2, width, dtype=torch.bfloat16)
    key = torch.full((1, 1, width), 2.0, dtype=torch.bfloat16)
    slot = 2 * (blocks - 1) + 1
    store_kv(KvPages(pool).layer(0), key, key + 1, torch.tensor([slot]))
    copy_blocks(KvPages(pool), torch.tensor([blocks - 1]), torch.tensor([1]))
    assert torch.equal(pool[blocks - 1, 0, :, 0, 1].float().mean(-1), torch.tensor([2.0, 3.0]))
    assert torch.equal(pool[1, 0, :, 0, 1], pool[blocks - 1, 0, :, 0, 1])


def test_copy_blocks_copies_all_layers_of_each_pair() -> None:
    pool = torch.randn(BLOCKS, 2, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM)
    before = pool.clone()
    copy_blocks(KvPages(pool), torch.tensor([4, 0, 4]), torch.tensor([1, 6, 2]))
    assert torch.equal(pool, before[[0, 4, 4, 3, 4, 5, 0]])


@pytest.mark.parametrize(
    ("key", "value", "slots", "named"),
    [
        (torch.zeros(2, KV_HEADS + 1, HEAD_DIM), torch.zeros(2, KV_HEADS, HEAD_DIM), torch.zeros(2).long(), "key"),
        (torch.zeros(2, KV_HEADS, HEAD_DIM), torch.zeros(3, KV_HEADS, HEAD_DIM), torch.zeros(2).long(), "value"),
        (torch.zeros(2, KV_HEADS, HEAD_DIM).double(), torch.zeros(2, KV_HEADS, HEAD_DIM), torch.zeros(2).long(), "key"),
        (torch.zeros(2, KV_HEADS, HEAD_DIM), torch.zeros(2, KV_HEADS, HEAD_DIM), torch.zeros(3).long(), "slots"),
        (torch.zeros(2, KV_HEADS, HEAD_DIM), torch.zeros(2, KV_HEADS, HEAD_DIM), torch.zeros(2).int(), "slots"),
    ],
)
def test_store_kv_rejects_inputs_outside_its_contract(
    key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        store_kv(KvPages(poisoned_pool()).layer(0), key, value, slots)


def test_copy_blocks_refuses_unequal_lists() -> None:
    with pytest.raises(ValueError, match="destinations"):
        copy_blocks(KvPages(poisoned_pool()), torch.tensor([1, 2]), torch.tensor([3]))
