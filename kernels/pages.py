"""Operations that write keys and values to the paged KV pool, or copy its blocks."""

import torch

from baton.kernels import reference
from baton.kernels.dispatch import launchers, pick, uses_triton
from baton.kernels.native.library import computes, stores
from baton.kernels.types import (
    HeadNorms,
    KvLayer,
    KvPages,
    check_angles,
    check_dtype,
    check_index,
    check_norm,
    check_shape,
)


def store_kv(kv: KvLayer, key: torch.Tensor, value: torch.Tensor | None, slots: torch.Tensor) -> None:
    """Write key and value of token `i` to slot `slots[i]` of the pool. Nothing else of the pool changes.

    kv: one layer of the pool; key, value: `[tokens, kv_heads, head_dim]` in the pool's dtype, or any float dtype if the
    pool is quantised (see types.py); value is None if values are prefixes of keys; slots: int64 `[tokens]`, distinct,
    each in `[0, blocks * block_tokens)`, or negative for padding, which is not written.
    """
    if (value is None) != (kv.value_prefix is not None):
        kinds = "keys and values" if value is None else "keys, of which values are prefixes"
        raise ValueError(f"value must {'be' if value is None else 'not be'} given: the pool stores {kinds}")
    for name, tensor in (("key", key), ("value", key if value is None else value)):
        check_shape(name, tensor, None, kv.kv_heads, kv.head_dim)
        if kv.scales is None:
            check_dtype(name, tensor, kv.data.dtype)
    if value is not None:
        check_shape("value", value, *key.shape)
    check_index("slots", slots, key.shape[0])
    pick(reference.store_kv, key)(kv, key, value, slots)


def copy_blocks(kv: KvPages, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copy block `sources[i]` of the pool to block `destinations[i]`, for all layers, with scales and recurrent states.

    sources, destinations: int64 `[copies]`. Destinations are distinct, and no block is both source and destination, so
    the order of copies does not matter.
    """
    check_index("sources", sources)
    check_index("destinations", destinations, sources.shape[0])
    pick(reference.copy_blocks, kv.data)(kv, sources, destinations)
    if kv.states is not None:
        kv.states[destinations] = kv.states.index_select(0, sources)


def gather_blocks(blocks: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor) -> None:
    """Copy block `block_ids[i]` to `out[i]`.

    blocks: uint8 `[blocks, rows, row_bytes]` with contiguous rows. A block is one row, or one row per layer and kind
    (keys, values); such rows may contain only some heads. out: uint8 `[copies, rows, row_bytes]`, contiguous rows;
    block_ids: int64 `[copies]`, each in `[0, blocks)`.
    """
    _check(blocks, block_ids, out)
    pick(reference.gather_blocks, blocks)(blocks, block_ids, out)


def scatter_blocks(source: torch.Tensor, blocks: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Copy `source[i]` to block `block_ids[i]` of `blocks`: the inverse of gather_blocks. Block ids are distinct."""
    _check(blocks, block_ids, source)
    pick(reference.scatter_blocks, blocks)(source, blocks, block_ids)


def compile_copies(blocks: torch.Tensor, piece: torch.Tensor) -> None:
    """Compile gather_blocks and scatter_blocks now instead of at first use.

    blocks, piece: tensors of the shapes that will be passed as `blocks` and `out` of gather_blocks.
    """
    if uses_triton(blocks):
        launchers().compile_copies(blocks, piece)


def _check(blocks: torch.Tensor, block_ids: torch.Tensor, piece: torch.Tensor) -> None:
    check_index("block_ids", block_ids)
    check_shape("blocks", blocks, None, None, None)
    check_shape("the piece", piece, len(block_ids), *blocks.shape[1:])
    for name, tensor in (("blocks", blocks), ("the piece", piece)):
        check_dtype(name, tensor, torch.uint8)


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: HeadNorms | None,
    kv: KvLayer,
    slots: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, store keys and values, and return the queries `[tokens, heads, head_dim]`.

    May overwrite `qkv`. qkv: contiguous `[tokens, heads + 2 * kv_heads, head_dim]`: queries, keys, values; norms:
    applied to queries and keys before the rotation; cos, sin: `[angles, at most head_dim / 2]` in the dtype of `qkv`,
    see `rotary`; rows: int64 `[tokens]`, the row of cos and sin for each token; None: row i is for token i; kv, slots:
    see `store_kv`. For a token with a negative slot, only the query is computed.
    """
    check_rotation(qkv, cos, sin, norms, kv, slots, rows)
    if rows is not None:
        if uses_triton(qkv):
            rotated: torch.Tensor = launchers().rotate_and_store(qkv, cos, sin, norms, kv, slots, rows)
            return rotated
        cos, sin = cos[rows], sin[rows]
    compute = pick(reference.rotate_and_store, qkv, computes(qkv) and stores(kv))
    return compute(qkv, cos, sin, norms, kv, slots)


def check_rotation(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: HeadNorms | None,
    kv: KvLayer,
    slots: torch.Tensor,
    rows: torch.Tensor | None,
) -> None:
    """Check the arguments of `rotate_and_store`. Raises: ValueError."""
    tokens = len(qkv)
    check_shape("qkv", qkv, None, None, kv.head_dim)
    check_angles(cos, sin, tokens if rows is None else len(cos), qkv)
    if norms is not None:
        _check_norms(norms, qkv)
    check_index("slots", slots, tokens)
    if kv.scales is None:
        check_dtype("kv", kv.data, qkv.dtype)
    if rows is not None:
        check_index("rows", rows, tokens)


def _check_norms(norms: HeadNorms, qkv: torch.Tensor) -> None:
    """Check the norm weights of query and key heads, which must be contiguous: kernels read them by address."""
    for name, weight in (("query norm", norms.query), ("key norm", norms.key)):
        check_norm(name, weight, qkv)
        if not weight.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
