"""States of recurrent layers in the pool's blocks: where the runs of a step read and write them.

The state after a sequence's last computed token is in that token's block. A run of tokens starts from the block of the
preceding token and leaves a state in each block that it touches. A full block ends with the state from which every
sequence with the same prefix can continue.
"""

import itertools
import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from baton.engine.config.model_config import RecurrentConfig
from baton.engine.models.batch import to_device
from baton.kernels.native.layers import PackedRecurrent
from baton.kernels.types import DecodeRows, KvPages, PagedRows, PrefillChunks, StateInit, StateRuns


class Recurrent(Protocol):
    """Recurrent layer without its projections."""

    def __call__(self, projected: torch.Tensor, kv: KvPages, runs: StateRuns) -> torch.Tensor:
        """Return the input of the output projection, `[tokens, any]`. projected: output of the input projections."""

    def packed(self) -> PackedRecurrent:
        """Return the layer as native kernels read it."""


class LayerStates(NamedTuple):
    """States of one layer in all blocks."""

    matrices: torch.Tensor  # float32 [blocks, *matrix_shape]
    inputs: torch.Tensor  # float32 [blocks, kernel, channels], last inputs of the convolution


def layer_states(sizes: RecurrentConfig, place: int, kv: KvPages) -> LayerStates:
    """Return views of the states of the layer at index `place` of a block."""
    if kv.states is None:
        raise ValueError("the pool has no room for states; the layout must include them")
    first, matrices = place * sizes.layer_numbers, math.prod(sizes.matrix_shape)
    own = kv.states[:, first : first + sizes.layer_numbers]
    return LayerStates(
        own[:, :matrices].unflatten(1, sizes.matrix_shape) if matrices else own[:, :0],
        own[:, matrices:].unflatten(1, (sizes.kernel, sizes.channels)),
    )


def begin_runs(rows: PagedRows, kv: KvPages, state_numbers: int) -> StateRuns:
    """Return where a step's layers read and write states; store the new token counts in the blocks that they write.

    A block whose token count is not the expected one has a BROKEN state. `state_numbers`: offset of the token count.
    """
    if kv.states is None:
        raise ValueError("the pool has no room for states; the layout must include them")
    ends = kv.states.view(torch.int32)[:, state_numbers]
    parts: list[tuple[torch.Tensor, ...]] = []
    long: list[list[int]] = []
    if rows.decode is not None:
        parts.append(_single_runs(rows.decode, kv.block_tokens))
    if rows.prefills is not None:
        long = _run_lengths(rows.prefills, kv.block_tokens)
        *of_chunks, follows_another = _chunk_runs(rows.prefills, long, kv.block_tokens)
        parts.append(tuple(of_chunks))
    sources, destinations, positions, lengths = (torch.cat(each) for each in zip(*parts, strict=True))
    alone = 0 if rows.decode is None else len(rows.decode.context_tokens)
    found = ends[sources].long()
    begins = torch.where(found == positions, StateInit.STORED, StateInit.BROKEN)
    begins[:alone].masked_fill_(found[:alone] == positions[:alone] + 1, StateInit.AGAIN)
    begins.masked_fill_(positions == 0, StateInit.ZERO)
    if rows.prefills is not None:
        begins[alone:].masked_fill_(follows_another > 0, StateInit.STORED)  # an earlier run in this step stored it
    ends[destinations] = (positions + lengths).int()
    starts = F.pad(lengths.cumsum(0), (1, 0))
    return StateRuns(starts, sources, destinations, begins, alone, tuple(itertools.chain.from_iterable(long)))


def _single_runs(decode: DecodeRows, block_tokens: int) -> tuple[torch.Tensor, ...]:
    """Return the source block, destination block, first position and length (1) of each decode row."""
    positions, firsts = decode.context_tokens - 1, decode.block_starts[:-1]
    sources = decode.block_ids[firsts + (positions - 1).clamp(min=0) // block_tokens]
    destinations = decode.block_ids[firsts + positions // block_tokens]
    return sources, destinations, positions, torch.ones_like(positions)


def _run_lengths(prefills: PrefillChunks, block_tokens: int) -> list[list[int]]:
    """Return the lengths of each chunk's runs: its number of tokens in its first block, in the second, and so on."""
    lengths = []
    for chunk in prefills.chunks:
        end = chunk.start + chunk.rows.stop - chunk.rows.start
        cuts = [chunk.start, *range(chunk.start // block_tokens * block_tokens + block_tokens, end, block_tokens), end]
        lengths.append([after - before for before, after in itertools.pairwise(cuts)])
    return lengths


def _chunk_runs(
    prefills: PrefillChunks, lengths: Sequence[Sequence[int]], block_tokens: int
) -> tuple[torch.Tensor, ...]:
    """Return each run's source block, destination block, first position, length, and whether it follows another run."""
    columns = [array("q") for _ in range(5)]  # the first two columns are indexes into `block_ids`
    first = 0
    for chunk, of_chunk in zip(prefills.chunks, lengths, strict=True):
        position = chunk.start
        for index, length in enumerate(of_chunk):
            places = (first + max(0, position - 1) // block_tokens, first + position // block_tokens)
            for column, number in zip(columns, (*places, position, length, index > 0), strict=True):
                column.append(number)
            position += length
        first += len(chunk.block_ids)
    block_ids = torch.cat([chunk.block_ids for chunk in prefills.chunks])
    before, own, *others = to_device(columns, block_ids.device)  # torch.tensor would wait for running kernels
    return block_ids[before], block_ids[own], *others
