"""Attention over paged KV: for one new token of each of many sequences (decode), and for prompt chunks (prefill)."""

import torch

from baton.kernels import reference
from baton.kernels.dispatch import launchers, pick, uses_triton
from baton.kernels.libraries.gathered import gathered_prefill, library_takes
from baton.kernels.native.library import attends
from baton.kernels.pages import check_rotation, rotate_and_store
from baton.kernels.types import (
    DecodeRows,
    HeadNorms,
    KvLayer,
    PrefillChunks,
    Scoring,
    check_dtype,
    check_index,
    check_kv,
    check_scoring,
    check_shape,
)


def paged_decode(
    query: torch.Tensor, kv: KvLayer, rows: DecodeRows, scoring: Scoring, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute attention of each sequence's last token, which is at position `context_tokens - 1`.

    Returns `[sequences, heads, value_dim]` in query's dtype; `out`: contiguous tensor for the result. query:
    `[sequences, heads, head_dim]`; kv: one layer of the pool, in query's dtype or quantised, with the KV of the
    complete context. The blocks of sequence s, in order of position, are `block_ids[block_starts[s] : block_starts[s +
    1]]` of `rows`: exactly `ceil(context_tokens[s] / block_tokens)` blocks, at least one. Softmax is in float32. No
    sequence's result depends on other sequences.

    A sequence with `context_tokens` 0 is padding: it has no blocks, and its result is zero. `block_ids` may have unused
    entries at the end. In this case kernels divide the work as if every context had `usual_tokens` tokens.
    """
    _check_decode(query, kv, rows, scoring)
    if out is not None and uses_triton(query):
        launchers().paged_decode(query, kv, rows, scoring, out)
        return out
    attended = pick(reference.paged_decode, query, attends(query, kv))(query, kv, rows, scoring)
    return attended if out is None else out.copy_(attended)


def _check_decode(query: torch.Tensor, kv: KvLayer, rows: DecodeRows, scoring: Scoring) -> None:
    sequences = query.shape[0]
    check_kv(kv, query)
    check_scoring(scoring, query)
    check_index("block_ids", rows.block_ids)
    check_index("block_starts", rows.block_starts, sequences + 1)
    check_index("context_tokens", rows.context_tokens, sequences)
    if rows.arrivals is not None:
        check_shape("arrivals", rows.arrivals, None)
        check_dtype("arrivals", rows.arrivals, torch.int32)
        if len(rows.arrivals) < sequences * kv.kv_heads:
            raise ValueError(f"arrivals: needs at least {sequences * kv.kv_heads} elements, got {len(rows.arrivals)}")


def rotated_decode(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: HeadNorms | None,
    kv: KvLayer,
    slots: torch.Tensor,
    angle_rows: torch.Tensor | None,
    rows: DecodeRows,
    scoring: Scoring,
) -> torch.Tensor:
    """Rotate and store `qkv` (see `rotate_and_store`), then compute `paged_decode`.

    `slots`: slot of each sequence's last token; negative for padding rows. On a GPU, one kernel does all of this if
    `angle_rows` is not None.
    """
    if angle_rows is None or not uses_triton(qkv):
        return paged_decode(rotate_and_store(qkv, cos, sin, norms, kv, slots, angle_rows), kv, rows, scoring)
    check_rotation(qkv, cos, sin, norms, kv, slots, angle_rows)
    _check_decode(qkv[:, : -2 * kv.kv_heads], kv, rows, scoring)
    attended: torch.Tensor = launchers().rotated_decode(qkv, cos, sin, norms, kv, slots, angle_rows, rows, scoring)
    return attended


def paged_prefill(
    query: torch.Tensor, kv: KvLayer, block_ids: torch.Tensor, start: int, scoring: Scoring
) -> torch.Tensor:
    """Compute causal attention at positions `[start, start + tokens)`; returns `[tokens, heads, value_dim]`.

    query: `[tokens, heads, head_dim]`; kv: one layer of the pool, in query's dtype or quantised, with the KV of
    positions `[0, start + tokens)`; block_ids: int64 `[ceil((start + tokens) / block_tokens)]`, blocks in order of
    position. Softmax is in float32.
    """
    check_kv(kv, query)
    check_scoring(scoring, query)
    check_index("block_ids", block_ids, -(-(start + query.shape[0]) // kv.block_tokens))
    return pick(reference.paged_prefill, query, attends(query, kv))(query, kv, block_ids, start, scoring)


def paged_prefills(
    query: torch.Tensor, kv: KvLayer, prefills: PrefillChunks, scoring: Scoring, out: torch.Tensor
) -> None:
    """Compute `paged_prefill` of several chunks, whose rows follow one another in `query` and in the contiguous `out`.

    On a GPU one kernel computes all chunks, except the last `prefills.by_library` chunks if `library_takes` holds: a
    library computes those.
    """
    first, chunks = prefills.chunks[0].rows.start, prefills.chunks
    attend = paged_prefill
    if uses_triton(query):
        check_kv(kv, query)
        check_scoring(scoring, query)
        in_place = len(chunks) - (prefills.by_library if library_takes(kv, scoring) else 0)
        if in_place:
            rows = slice(0, chunks[in_place - 1].rows.stop - first)
            launchers().paged_prefills(query[rows], kv, prefills.first(in_place), scoring, out[rows])
        chunks, attend = chunks[in_place:], gathered_prefill
        if chunks and prefills.planned is not None:
            rows = slice(chunks[0].rows.start - first, None)
            prefills.planned(query[rows], kv, scoring, out[rows])
            return
    for each in chunks:
        rows = slice(each.rows.start - first, each.rows.stop - first)
        out[rows] = attend(query[rows], kv, each.block_ids, each.start, scoring)
