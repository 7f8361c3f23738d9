"""Gated delta nets, layers with a recurrent state instead of keys and values; and where steps read and write states.

The state after a sequence's last computed token is in that token's block. A run of tokens starts from the block of the
preceding token and leaves a state in each block that it touches. A full block ends with the state from which every
sequence with the same prefix can continue.
"""

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from baton.engine.config.model_config import DeltaConfig
from baton.engine.models.batch import to_device
from baton.kernels.delta import causal_convolution, gated_delta_rule
from baton.kernels.native.layers import PackedDelta
from baton.kernels.norms import gate_mul, rms_norm
from baton.kernels.types import DecodeRows, DeltaRates, KvPages, PagedRows, PrefillChunks, StateInit, StateRuns


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Gated delta net without its projections."""

    sizes: DeltaConfig
    place: int  # index of the layer's state in a block
    convolution: torch.Tensor  # [channels, kernel]
    rates: DeltaRates
    norm: torch.Tensor  # [value_dim]
    eps: float

    def __call__(self, projected: torch.Tensor, kv: KvPages, runs: StateRuns) -> torch.Tensor:
        """Return output `[tokens, value_size]`. projected: each token's queries, keys, values, gates, betas, decays."""
        sizes, tokens = self.sizes, len(projected)
        mixed, gate, beta, decay = self._split(projected)
        matrices, inputs = self._states(kv)
        mixed = causal_convolution(mixed, self.convolution, inputs, runs)
        keys = sizes.key_heads * sizes.key_dim
        query, key, value = mixed.split((keys, keys, sizes.value_size), dim=1)
        made = gated_delta_rule(
            query.view(tokens, sizes.key_heads, sizes.key_dim),
            key.view(tokens, sizes.key_heads, sizes.key_dim),
            value.view(tokens, sizes.value_heads, sizes.value_dim),
            decay,
            beta,
            self.rates,
            matrices,
            runs,
        )
        normal = rms_norm(made.to(projected.dtype), self.norm, self.eps)
        gated = torch.cat((gate.float(), normal.view(tokens, -1).float()), dim=1)
        return gate_mul(gated).to(projected.dtype)

    def packed(self) -> PackedDelta:
        sizes = self.sizes
        return PackedDelta(
            convolution=self.convolution.float().contiguous(),
            rates=self.rates,
            norm=self.norm.float(),
            key_heads=sizes.key_heads,
            value_heads=sizes.value_heads,
            key_dim=sizes.key_dim,
            first_number=self.place * sizes.layer_numbers,
            eps=self.eps,
            is_interleaved=sizes.interleaved,
        )

    def _split(self, projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the convolution's inputs, the gates of values, and each value head's inputs of beta and of decay."""
        sizes = self.sizes
        if not sizes.interleaved:
            widths = [sizes.channels, sizes.value_size, sizes.value_heads, sizes.value_heads]
            return tuple(torch.split(projected, widths, dim=1))
        together = sizes.value_heads // sizes.key_heads
        values = together * sizes.value_dim
        rest = 2 * sizes.value_heads
        heads, numbers = projected.split((projected.shape[1] - rest, rest), dim=1)
        parts = heads.unflatten(1, (sizes.key_heads, -1)).split((sizes.key_dim, sizes.key_dim, values, values), dim=2)
        query, key, value, gate = (part.flatten(1) for part in parts)
        beta, decay = (part.flatten(1) for part in numbers.unflatten(1, (sizes.key_heads, -1)).chunk(2, dim=2))
        return torch.cat((query, key, value), dim=1), gate, beta, decay

    def _states(self, kv: KvPages) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all blocks' states of this layer: the matrices, and the last inputs of the convolution."""
        if kv.states is None:
            raise ValueError("the pool has no room for states; the layout must include them")
        sizes, first = self.sizes, self.place * self.sizes.layer_numbers
        matrices = sizes.value_heads * sizes.key_dim * sizes.value_dim
        own = kv.states[:, first : first + sizes.layer_numbers]
        return (
            own[:, :matrices].unflatten(1, (sizes.value_heads, sizes.key_dim, sizes.value_dim)),
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
