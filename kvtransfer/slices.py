"""Byte ranges to copy between two pools, which may have different degrees of tensor parallelism.

A block is `[layer][k, v][kv_head]`: one row of heads for the keys, and one for the values, of each layer. Each rank of
a worker has the same heads of every row. The scales of a quantised head are stored within the head.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from baton.kvtransfer.transport import BlockOutOfRange, BlockPair, LinkRate, Transport, split_runs


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Shape of a pool `[part][block][row]`. Each rank of a worker has one part, with the same number of heads."""

    num_blocks: int
    block_bytes: int  # bytes of a block, with the heads of all parts
    rows: int = 1  # 2 x layers (keys and values), or any divisor of this if both pools have the same `parts`
    parts: int = 1

    @property
    def part_block_bytes(self) -> int:
        return self.block_bytes // self.parts

    @property
    def part_bytes(self) -> int:
        return self.num_blocks * self.part_block_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in one part."""
        return self.part_block_bytes // self.rows


class HeadSlice(NamedTuple):
    """Heads in both a part of the source and a part of the destination, as byte ranges of the rows of both parts."""

    source_part: int
    destination_part: int
    source_offset: int
    destination_offset: int
    width: int


class Span(NamedTuple):
    """Copy of `rows` byte ranges of `width` bytes each.

    `source` and `destination`: byte offsets of the first range in the two pools. Pitches: distances in bytes from the
    start of a range to the start of the next range.
    """

    source: int
    destination: int
    rows: int
    width: int
    source_pitch: int
    destination_pitch: int


def plan_slices(
    source: PoolShape, destination: PoolShape, destination_parts: Sequence[int] | None = None
) -> tuple[HeadSlice, ...]:
    """Return the slices that together fill `destination_parts`. `destination_parts`: indices of parts; None: all."""
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
    """Destination of consecutive bytes of a block: a byte range of the block in one part of the pool."""

    part: int
    offset: int
    width: int


def landing_places(source: PoolShape, destination: PoolShape) -> tuple[Landing, ...]:
    """Return the destinations of a block's bytes in the order in which the source sends them: by part, then by row."""
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
    """Yield the copies for `pairs`. Blocks that are adjacent in both pools are merged into one copy.

    Raises: BlockOutOfRange, at the call and not while iterating.
    """
    for pair in pairs:
        if not (0 <= pair.source < source.num_blocks and 0 <= pair.destination < destination.num_blocks):
            raise BlockOutOfRange(
                f"{pair}: source must be below {source.num_blocks}, destination below {destination.num_blocks}"
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
"""Memory of a pool, uint8, one-dimensional: one tensor with all parts, or one tensor per part."""


def parts_of(storage: Storage, shape: PoolShape) -> tuple[torch.Tensor, ...]:
    """Return a view of each part of the pool: uint8 `[part_bytes]`. Raises: ValueError for a wrong number of parts."""
    if isinstance(storage, torch.Tensor):
        return storage[: shape.parts * shape.part_bytes].view(shape.parts, shape.part_bytes).unbind()
    if len(storage) != shape.parts:
        raise ValueError(f"{len(storage)} parts given, the pool has {shape.parts}")
    return tuple(part[: shape.part_bytes] for part in storage)


class EachPart:
    """A `Transport` into a pool whose parts are on different devices. Owns and closes one transport per part."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self.name = transports[0].name
        self._transports = transports

    def copy(self, transfer_id: bytes, pairs: Sequence[BlockPair]) -> int:
        """Copy with every transport. Raises: their exceptions; BlockOutOfRange, before anything is copied."""
        return sum(transport.copy(transfer_id, pairs) for transport in self._transports)

    def measure(self, nbytes: int) -> LinkRate:
        """Measure the first part's transport, since the transports of all parts are equally fast."""
        return self._transports[0].measure(nbytes)

    def close(self) -> None:
        for transport in self._transports:
            transport.close()


class WithCopies:
    """Transport into the pool `storage` that also updates `copies`, which are other ranks' copies of this pool.

    Owns and closes `transport`.
    """

    def __init__(
        self, transport: Transport, storage: torch.Tensor, copies: Sequence[torch.Tensor], shape: PoolShape
    ) -> None:
        self.name = transport.name
        self._transport = transport
        self._blocks, *self._copies = (each.view(shape.num_blocks, shape.block_bytes) for each in (storage, *copies))

    def copy(self, transfer_id: bytes, pairs: Sequence[BlockPair]) -> int:
        """Copy blocks into the pool and into its copies. Raises: exceptions of `transport`."""
        copied = self._transport.copy(transfer_id, pairs)
        for copy in self._copies:
            for pair in pairs:
                copy[pair.destination].copy_(self._blocks[pair.destination])
            if copy.is_cuda:
                torch.cuda.synchronize(copy.device)  # the other rank reads its copy without waiting for this stream
        return copied

    def measure(self, nbytes: int) -> LinkRate:
        return self._transport.measure(nbytes)

    def close(self) -> None:
        self._transport.close()


class MappedMemory(Protocol):
    """Peer's pool from which this process can copy directly into its own pool. Every call blocks for a bounded time."""

    def copy(self, spans: Sequence[Span]) -> None:
        """Copy spans and return when all of them have arrived. Raises: TransferError."""

    def measure(self, nbytes: int) -> LinkRate:
        """Measure the rate of reading at most `nbytes` bytes of the peer into scratch memory. Raises: TransferError."""

    def close(self) -> None:
        """Close the peer's pool. Call it once, at any time: a running copy finishes first or fails."""


class MappedTransport:
    """Transport that copies directly out of `memory`, which it owns. The pools may have different numbers of parts."""

    name: str

    def __init__(
        self, memory: MappedMemory, source: PoolShape, own: PoolShape, own_parts: Sequence[int] | None = None
    ) -> None:
        """Create a transport. `own_parts`: parts of this pool that `memory` copies into; None: all."""
        self._memory = memory
        self._source = source
        self._own = own
        self._slices = plan_slices(source, own, own_parts)

    def copy(self, transfer_id: bytes, pairs: Sequence[BlockPair]) -> int:
        """Copy blocks. Raises: BlockOutOfRange, before anything is copied; PeerUnreachable if closed; CopyBroken."""
        spans = list(plan_spans(pairs, self._slices, self._source, self._own))
        self._memory.copy(spans)
        return sum(span.rows * span.width for span in spans)

    def measure(self, nbytes: int) -> LinkRate:
        return self._memory.measure(nbytes)

    def close(self) -> None:
        self._memory.close()
