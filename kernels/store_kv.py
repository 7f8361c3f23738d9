"""Writes keys and values of new tokens into the paged pool."""

import torch

from kernels import reference
from kernels.check import check_dtype, check_index, check_shape


def store_kv(kv: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes token `i` into slot `slots[i]`, in place; touches nothing else of the pool.

    kv: one layer of the pool, `[blocks, 2, kv_heads, block_tokens, head_dim]`; key, value: `[tokens, kv_heads,
    head_dim]` of its dtype; slots: int64 `[tokens]`, distinct, each in `[0, blocks * block_tokens)`.
    """
    check_shape("kv", kv, None, 2, None, None, None)
    for name, tensor in (("key", key), ("value", value)):
        check_shape(name, tensor, None, kv.shape[2], kv.shape[4])
        check_dtype(name, tensor, kv.dtype)
    check_shape("value", value, *key.shape)
    check_index("slots", slots, key.shape[0])
    reference.store_kv(kv, key, value, slots)
