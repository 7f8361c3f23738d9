"""Attention that depends on absolute positions: queries scaled by position, and attention within chunks (Llama 4).

A token of a chunked layer sees the tokens since the last multiple of the chunk's size. That is full attention over the
blocks of its own chunk, so it needs no kernel of its own.
"""

from dataclasses import replace
from typing import NamedTuple

import torch

from baton.engine.config.model_config import DecoderConfig, QueryScale
from baton.engine.models.batch import Batch
from baton.kernels.types import DecodeRows, GroupRows, PrefillChunks, PrefillRows


class Positions(NamedTuple):
    """Attention inputs of one step that only layers of some families use."""

    query_scales: torch.Tensor | None  # float32 [tokens]
    chunked: tuple[GroupRows, ...] | None  # the step's rows by layer group, as chunked layers see them


def positions_of(config: DecoderConfig, batch: Batch, block_tokens: int) -> Positions:
    scale, chunk = config.query_scale, config.attention_chunk
    return Positions(
        None if scale is None else query_scales(scale, batch.positions),
        None if chunk is None else tuple(chunk_rows(rows, chunk, block_tokens) for rows in batch.groups),
    )


def is_plain(config: DecoderConfig, batch: Batch) -> bool:
    """Return whether no position of the batch is scaled, and none is outside the first chunk. Waits for a GPU."""
    scale, most = config.query_scale, config.attention_chunk
    if scale is not None:
        most = min(most or scale.span, scale.span - scale.offset)
    return most is None or bool((batch.positions < most).all())


def query_scales(scale: QueryScale, positions: torch.Tensor) -> torch.Tensor:
    spans = torch.floor((positions.float() + scale.offset) / scale.span)
    return 1 + scale.strength * torch.log1p(spans)


def chunk_rows(rows: GroupRows, chunk_tokens: int, block_tokens: int) -> GroupRows:
    """Return the rows with contexts that begin at each token's chunk. `chunk_tokens`: a multiple of `block_tokens`."""
    decode, prefills = rows.decode, rows.prefills
    return GroupRows(
        rows.slots,
        None if decode is None else _decode(decode, chunk_tokens, block_tokens),
        None if prefills is None else _prefills(prefills, chunk_tokens, block_tokens),
    )


def _decode(rows: DecodeRows, chunk_tokens: int, block_tokens: int) -> DecodeRows:
    """Leave out the blocks of passed chunks. All shapes depend on those of `rows` alone, as CUDA graphs require."""
    passed = (rows.context_tokens - 1).clamp(min=0) // chunk_tokens * (chunk_tokens // block_tokens)  # blocks
    begins = rows.block_starts[:-1] + passed
    ends = (rows.block_starts.diff() - passed).cumsum(0)
    starts = torch.cat((torch.zeros_like(ends[:1]), ends))
    index = torch.arange(len(rows.block_ids), device=ends.device)
    owner = torch.searchsorted(ends, index, right=True).clamp(max=len(ends) - 1)
    source = (begins[owner] + index - starts[owner]).clamp(max=len(rows.block_ids) - 1)
    contexts = rows.context_tokens - passed * block_tokens
    return replace(rows, block_ids=rows.block_ids[source], block_starts=starts, context_tokens=contexts)


def _prefills(prefills: PrefillChunks, chunk_tokens: int, block_tokens: int) -> PrefillChunks:
    """Divide prompt chunks where an attention chunk ends."""
    pieces: list[PrefillRows] = []
    ends, row_starts, block_starts = [], [0], [0]
    first = prefills.chunks[0].rows.start
    for rows in prefills.chunks:
        row, position, end = rows.rows.start, rows.start, rows.start + rows.rows.stop - rows.rows.start
        while position < end:
            begin = position // chunk_tokens * chunk_tokens
            stop = min(end, begin + chunk_tokens)
            blocks = rows.block_ids[begin // block_tokens : -(-stop // block_tokens)]
            pieces.append(PrefillRows(slice(row, row + stop - position), position - begin, blocks))
            row, position = row + stop - position, stop
            ends.append(stop - begin)
            row_starts.append(row - first)
            block_starts.append(block_starts[-1] + len(blocks))
    row_starts_on, ends_on, block_starts_on = (
        torch.tensor(each, device=prefills.ends.device) for each in (row_starts, ends, block_starts)
    )
    block_ids = torch.cat([piece.block_ids for piece in pieces])
    return PrefillChunks(tuple(pieces), row_starts_on, ends_on, block_ids, block_starts_on)
