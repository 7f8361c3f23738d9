"""The byte ranges to copy when tensor parallelism cuts two pools, alike or not, and the copies out of a pool in reach.

A block is `[layer][k, v][kv_head]` of heads, so its rows `[layer][k, v]` can be cut between heads: each rank of a
worker keeps the same heads of every row. A quantised head brings its scales along, since they lie within it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from baton.kvtransfer.transport import BlockOutOfRange, BlockPair, LinkRate, Transport, split_runs


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
        """Return the bytes of a row of one part."""
        return self.part_block_bytes // self.rows


class HeadSlice(NamedTuple):
    """Heads that a part of the source and a part of the destination have in common, in bytes of their rows."""

    source_part: int
    destination_part: int
    source_offset: int
    destination_offset: int
    width: int


class Span(NamedTuple):
    """Span of `rows` pieces of `width` bytes, each a pitch after the one before, from offsets into either pool."""

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


class Landing(NamedTuple):
    """Bytes of a block of our pool: of one part's share of it."""

    part: int
    offset: int
    width: int


def landing_places(source: PoolShape, destination: PoolShape) -> tuple[Landing, ...]:
    """Return where the bytes of a block belong that arrive in the source's order: of each part, row by row."""
    if source.parts == destination.parts:
        return tuple(Landing(part, 0, destination.part_block_bytes) for part in range(destination.parts))
    slices = sorted(plan_slices(source, destination), key=lambda piece: (piece.source_part, piece.source_offset))
    places: list[Landing] = []
    for part in range(source.parts):
        of_part = [piece for piece in slices if piece.source_part == part]
        for row in range(source.rows):
            for piece in of_part:
                offset = row * destination.row_bytes + piece.destination_offset
                last = places[-1] if places else Landing(-1, 0, 0)
                if (last.part, last.offset + last.width) == (piece.destination_part, offset):
                    places[-1] = last._replace(width=last.width + piece.width)
                else:
                    places.append(Landing(piece.destination_part, offset, piece.width))
    return tuple(places)


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


Storage = torch.Tensor | tuple[torch.Tensor, ...]
"""Parts of a pool, consecutive in one dimension of uint8, or each by itself."""


def parts_of(storage: Storage, shape: PoolShape) -> tuple[torch.Tensor, ...]:
    """Return each part: uint8 `[part_bytes]`, not a copy. Raises: ValueError for another number of parts."""
    if isinstance(storage, torch.Tensor):
        return storage[: shape.parts * shape.part_bytes].view(shape.parts, shape.part_bytes).unbind()
    if len(storage) != shape.parts:
        raise ValueError(f"{len(storage)} parts of a pool that has {shape.parts}")
    return tuple(part[: shape.part_bytes] for part in storage)


class EachPart:
    """A `Transport` of one for each part of our pool, where those lie on different devices. Owns and closes them."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self.name = transports[0].name
        self._transports = transports

    def copy(self, transfer_id: bytes, pairs: Sequence[BlockPair]) -> int:
        """Copy with every transport and raise their exceptions; for blocks out of range before anything is copied."""
        return sum(transport.copy(transfer_id, pairs) for transport in self._transports)

    def measure(self, nbytes: int) -> LinkRate:
        """Measure the first link: the others are equal."""
        return self._transports[0].measure(nbytes)

    def close(self) -> None:
        for transport in self._transports:
            transport.close()


class WithCopies:
    """A `Transport` into a pool of which other ranks have copies: what comes goes on to those. Owns and closes it."""

    def __init__(
        self, transport: Transport, storage: torch.Tensor, copies: Sequence[torch.Tensor], shape: PoolShape
    ) -> None:
        self.name = transport.name
        self._transport = transport
        self._blocks, *self._copies = (each.view(shape.num_blocks, shape.block_bytes) for each in (storage, *copies))

    def copy(self, transfer_id: bytes, pairs: Sequence[BlockPair]) -> int:
        """Copy blocks; raises the link's exceptions."""
        copied = self._transport.copy(transfer_id, pairs)
        for copy in self._copies:
            for pair in pairs:
                copy[pair.destination].copy_(self._blocks[pair.destination])
            if copy.is_cuda:
                torch.cuda.synchronize(copy.device)  # another process reads it, and waits for no stream of ours
        return copied

    def measure(self, nbytes: int) -> LinkRate:
        return self._transport.measure(nbytes)

    def close(self) -> None:
        self._transport.close()


class MappedMemory(Protocol):
    """A peer's pool beside our own. Its methods block, and bound their waiting."""

    def copy(self, spans: Sequence[Span]) -> None:
        """Returns when all of them have landed in our pool. Raises TransferError."""

    def measure(self, nbytes: int) -> LinkRate:
        """Reads at most so many of the peer's bytes, into no pool. Raises TransferError."""

    def close(self) -> None:
        """Close at any time, once; a running copy ends first or fails."""


class MappedTransport:
    """Owns `memory` and closes it. The pools may be cut into different numbers of parts."""

    name: str

    def __init__(
        self, memory: MappedMemory, source: PoolShape, own: PoolShape, own_parts: Sequence[int] | None = None
    ) -> None:
        """Create a transport. `own_parts`: those in our pool's memory; None: all."""
        self._memory = memory
        self._source = source
        self._own = own
        self._slices = plan_slices(source, own, own_parts)

    def copy(self, transfer_id: bytes, pairs: Sequence[BlockPair]) -> int:
        """Copy blocks. Raises: BlockOutOfRange, before anything is copied; PeerUnreachable (closed); CopyBroken."""
        spans = list(plan_spans(pairs, self._slices, self._source, self._own))
        self._memory.copy(spans)
        return sum(span.rows * span.width for span in spans)

    def measure(self, nbytes: int) -> LinkRate:
        return self._memory.measure(nbytes)

    def close(self) -> None:
        self._memory.close()
