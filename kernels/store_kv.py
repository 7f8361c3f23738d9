"""Writes keys and values of new tokens into the paged pool."""

import torch

from kernels import reference
from kernels.check import check_dtype, check_index, check_shape
from kernels.kv_pages import KvLayer
from kernels.on_triton import triton_kernels


def store_kv(kv: KvLayer, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes token `i` into slot `slots[i]`, in place; touches nothing else of the pool.

    kv: one layer of the pool; key, value: `[tokens, kv_heads, head_dim]` of its dtype, or of any floating dtype where
    it is quantised (quantise_kv.py says how); slots: int64 `[tokens]`, distinct, each in `[0, blocks * block_tokens)`;
    a negative one pads a batch: that token is not written anywhere.
    """
    for name, tensor in (("key", key), ("value", value)):
        check_shape(name, tensor, None, kv.kv_heads, kv.head_dim)
        if kv.scales is None:
            check_dtype(name, tensor, kv.data.dtype)
    check_shape("value", value, *key.shape)
    check_index("slots", slots, key.shape[0])
    kernels = triton_kernels(key)
    (reference if kernels is None else kernels).store_kv(kv, key, value, slots)
