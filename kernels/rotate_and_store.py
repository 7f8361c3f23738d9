"""From the fused projection of queries, keys and values to rotated queries, and keys and values in the paged pool."""

from dataclasses import dataclass

import torch

from kernels import reference
from kernels.check import check_dtype, check_index, check_shape
from kernels.kv_pages import KvLayer
from kernels.native.library import native_library
from kernels.on_triton import triton_kernels


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of every query head and every key head, before they are rotated (Qwen3, arXiv:2505.09388)."""

    query: torch.Tensor  # [head_dim], contiguous, in the dtype of what is computed
    key: torch.Tensor  # likewise
    eps: float


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: HeadNorms | None,
    kv: KvLayer,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Returns the queries, `[tokens, heads, head_dim]`; keys and values go to `slots` of `kv`. May overwrite `qkv`.

    qkv: `[tokens, heads + 2 * kv_heads, head_dim]`, contiguous: queries, then keys, then values; cos, sin:
    `[tokens, head_dim / 2]` of its dtype, see rotary.py; kv and slots as in store_kv.py, negative ones too: of such a
    token only the queries are made.
    """
    tokens, _, head_dim = qkv.shape
    check_shape("qkv", qkv, None, None, kv.head_dim)
    for name, tensor in (("cos", cos), ("sin", sin)):
        check_shape(name, tensor, tokens, head_dim // 2)
        check_dtype(name, tensor, qkv.dtype)
    if norms is not None:
        _check_norms(norms, qkv)
    check_index("slots", slots, tokens)
    if kv.scales is None:
        check_dtype("kv", kv.data, qkv.dtype)
    if (kernels := triton_kernels(qkv)) is not None:
        query: torch.Tensor = kernels.rotate_and_store(qkv, cos, sin, norms, kv, slots)
        return query
    native = native_library()
    if native is not None and native.layers.takes(qkv) and native.layers.stores(kv):
        return native.layers.rotate_and_store(qkv, cos, sin, norms, kv, slots)
    return reference.rotate_and_store(qkv, cos, sin, norms, kv, slots)


def _check_norms(norms: HeadNorms, qkv: torch.Tensor) -> None:
    """Kernels read their numbers by address."""
    for name, weight in (("query norm", norms.query), ("key norm", norms.key)):
        check_shape(name, weight, qkv.shape[2])
        check_dtype(name, weight, qkv.dtype)
        if not weight.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
