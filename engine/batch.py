"""A plan's chunks as tensors. Single-token chunks come first, so that decode attention is one slice of rows.

Rows that have an adapter stand side by side (engine/lora/rows.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.lora.rows import AdapterRows, adapter_rows, batch_order
from engine.plan import Chunk


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The first `len(context_tokens)` rows: one token each; arguments of kernels/paged_decode.py."""

    block_ids: torch.Tensor
    block_starts: torch.Tensor
    context_tokens: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Rows of one longer chunk; arguments of kernels/paged_prefill.py."""

    rows: slice
    start: int
    block_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    slots: torch.Tensor  # int64 [tokens], block * block_tokens + offset
    decode: DecodeRows | None
    prefills: tuple[PrefillRows, ...]
    chunk_rows: tuple[slice, ...]  # rows of each chunk, parallel to the chunks given
    adapters: AdapterRows | None = None  # where no row has one


def make_batch(chunks: Sequence[Chunk], block_tokens: int, device: torch.device) -> Batch:
    """Raises ValueError for a chunk without tokens, or whose block table does not cover them."""
    for chunk in chunks:
        if not chunk.token_ids or len(chunk.block_table) * block_tokens < chunk.end:
            blocks = len(chunk.block_table)
            raise ValueError(f"request {chunk.request_id}: {blocks} blocks for positions {chunk.start} to {chunk.end}")
    order = sorted(
        range(len(chunks)), key=lambda index: batch_order(len(chunks[index].token_ids) > 1, chunks[index].adapter)
    )
    chunk_rows = [slice(0, 0)] * len(chunks)
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    prefills: list[PrefillRows] = []
    adapters: list[int] = []
    for index in order:
        chunk = chunks[index]
        rows = slice(len(token_ids), len(token_ids) + len(chunk.token_ids))
        chunk_rows[index] = rows
        token_ids += chunk.token_ids
        adapters += [chunk.adapter] * len(chunk.token_ids)
        for position in range(chunk.start, chunk.end):
            positions.append(position)
            slots.append(chunk.block_table[position // block_tokens] * block_tokens + position % block_tokens)
        if len(chunk.token_ids) > 1:
            block_ids = torch.tensor(_used_blocks(chunk, block_tokens), device=device)
            prefills.append(PrefillRows(rows, chunk.start, block_ids))
    return Batch(
        token_ids=torch.tensor(token_ids, device=device),
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        decode=_decode_rows(
            [chunks[index] for index in order if len(chunks[index].token_ids) == 1], block_tokens, device
        ),
        prefills=tuple(prefills),
        chunk_rows=tuple(chunk_rows),
        adapters=adapter_rows(adapters, device),
    )


def _decode_rows(chunks: Sequence[Chunk], block_tokens: int, device: torch.device) -> DecodeRows | None:
    if not chunks:
        return None
    block_ids: list[int] = []
    block_starts = [0]
    for chunk in chunks:
        block_ids += _used_blocks(chunk, block_tokens)
        block_starts.append(len(block_ids))
    return DecodeRows(
        block_ids=torch.tensor(block_ids, device=device),
        block_starts=torch.tensor(block_starts, device=device),
        context_tokens=torch.tensor([chunk.end for chunk in chunks], device=device),
    )


def _used_blocks(chunk: Chunk, block_tokens: int) -> Sequence[int]:
    return list(chunk.block_table[: -(-chunk.end // block_tokens)])
