"""The byte ranges to copy when tensor parallelism cuts two pools, alike or not. Pure arithmetic, knows no memory.

A block is `[layer][k, v][kv_head]` of heads, so its rows `[layer][k, v]` can be cut between heads: each rank of a
worker keeps the same heads of every row. A quantised head brings its scales along, since they lie within it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtransfer.errors import BlockOutOfRange
from kvtransfer.transport import BlockPair, split_runs


@dataclass(frozen=True, slots=True)
class PoolShape:
    """A pool as `[part][block][row]`: one part for each rank, with an equal share of the heads of every block."""

    num_blocks: int
    block_bytes: int  # with the heads of all parts
    rows: int = 1  # layers x (keys, values); any divisor of it does where both pools have as many parts
    parts: int = 1

    @property
    def part_block_bytes(self) -> int:
        return self.block_bytes // self.parts

    @property
    def part_bytes(self) -> int:
        return self.num_blocks * self.part_block_bytes

    @property
    def row_bytes(self) -> int:
        """Of one part."""
        return self.part_block_bytes // self.rows


class HeadSlice(NamedTuple):
    """Heads that a part of the source and a part of the destination have in common, in bytes of their rows."""

    source_part: int
    destination_part: int
    source_offset: int
    destination_offset: int
    width: int


class Span(NamedTuple):
    """`rows` pieces of `width` bytes, each a pitch after the one before, from offsets into either pool."""

    source: int
    destination: int
    rows: int
    width: int
    source_pitch: int
    destination_pitch: int


def plan_slices(
    source: PoolShape, destination: PoolShape, destination_parts: Sequence[int] | None = None
) -> tuple[HeadSlice, ...]:
    """The slices that fill `destination_parts` (default: all): every byte once, from the one part that has it."""
    wanted = range(destination.parts) if destination_parts is None else destination_parts
    found = []
    for own in wanted:
        own_start = own * destination.row_bytes
        for other in range(source.parts):
            other_start = other * source.row_bytes
            start = max(own_start, other_start)
            end = min(own_start + destination.row_bytes, other_start + source.row_bytes)
            if start < end:
                found.append(HeadSlice(other, own, start - other_start, start - own_start, end - start))
    return tuple(found)


def plan_spans(
    pairs: Sequence[BlockPair], slices: Sequence[HeadSlice], source: PoolShape, destination: PoolShape
) -> Iterator[Span]:
    """The copies for blocks that lie anywhere; neighbours on both sides go together. Raises: BlockOutOfRange, first."""
    for pair in pairs:
        if not (0 <= pair.source < source.num_blocks and 0 <= pair.destination < destination.num_blocks):
            raise BlockOutOfRange(
                f"{pair} is not within {source.num_blocks} source, {destination.num_blocks} own blocks"
            )
    return _spans(pairs, slices, source, destination)


def _spans(
    pairs: Sequence[BlockPair], slices: Sequence[HeadSlice], source: PoolShape, destination: PoolShape
) -> Iterator[Span]:
    for run in split_runs(pairs, both_adjacent):
        rows = len(run) * source.rows
        for piece in slices:
            from_block = piece.source_part * source.part_bytes + run[0].source * source.part_block_bytes
            to_block = (
                piece.destination_part * destination.part_bytes + run[0].destination * destination.part_block_bytes
            )
            start, target = from_block + piece.source_offset, to_block + piece.destination_offset
            if piece.width == source.row_bytes == destination.row_bytes:
                yield Span(start, target, 1, rows * piece.width, rows * piece.width, rows * piece.width)
            else:
                yield Span(start, target, rows, piece.width, source.row_bytes, destination.row_bytes)


def both_adjacent(left: BlockPair, right: BlockPair) -> bool:
    return right.source == left.source + 1 and right.destination == left.destination + 1
