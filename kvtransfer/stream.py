"""Pulls of blocks as a stream of bytes: the slowest transport, which works between any two workers.

Release 0.1.0 has no other one between hosts, and GPU pools without NIXL or NCCL have none either. Knows no RPC library.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from baton.kvtransfer.slices import PoolShape, Storage, landing_places, parts_of, plan_slices
from baton.kvtransfer.transport import BlockOutOfRange, BlockPair, ChecksumDiffers, CopyBroken, LinkRate, split_runs


class BlockLink(Protocol):
    """The connection, used on the pull thread. It bounds its waits, and raises TransferError where its library raises.

    Bytes come in order, in pieces of any size.
    """

    def read(self, transfer_id: bytes, first_block: int, num_blocks: int) -> Iterable[bytes]:
        """The bytes of logical blocks of a transfer."""

    def probe(self, nbytes: int) -> Iterable[bytes]:
        """Return `nbytes` arbitrary bytes."""


class StreamTransport:
    """Create a transport. `pool`: this worker's, on any devices. `link` belongs to its creator.

    The bytes of a block are those of each part of the source, one after the other.
    """

    name = "grpc"

    def __init__(self, link: BlockLink, pool: Storage, source: PoolShape, own: PoolShape) -> None:
        parts = parts_of(pool, own)
        self._link = link
        self._pool = parts[0]
        self._devices = {part.device for part in parts}
        self._own = own
        self._cuts = BlockCuts(parts, source, own) if source.parts > 1 or own.parts > 1 else None
        # On CPU numpy copies: they stay on the calling thread, while torch would spread them over its compute threads.
        self._array = self._pool.numpy() if self._pool.device.type == "cpu" else None
        self._block_bytes = own.block_bytes

    def copy(self, transfer_id: bytes, pairs: Sequence[BlockPair]) -> int:
        """Pull blocks. Raises: CopyBroken; BlockOutOfRange, before any request."""
        own_blocks = self._own.num_blocks
        for pair in pairs:
            if not 0 <= pair.destination < own_blocks:
                raise BlockOutOfRange(f"{pair} is not within {own_blocks} own blocks")
        for run in split_runs(pairs, _logically_adjacent):
            self._fill(run, self._link.read(transfer_id, run[0].logical, len(run)))
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # only then has the copy ended
        return len(pairs) * self._block_bytes

    def measure(self, nbytes: int) -> LinkRate:
        """Measure the link. Raises: CopyBroken."""
        started = time.monotonic()
        received = sum(map(len, self._link.probe(nbytes)))
        if received != nbytes:
            raise CopyBroken(f"the peer sent {received} of {nbytes} bytes")
        return LinkRate(nbytes, time.monotonic() - started)

    def close(self) -> None:
        """Do nothing: the transport owns nothing of the peer."""

    def _fill(self, run: Sequence[BlockPair], pieces: Iterable[bytes]) -> None:
        expected, received = len(run) * self._block_bytes, 0
        write = self._write if self._cuts is None else self._cuts.write
        for piece in pieces:
            if received + len(piece) > expected:
                raise CopyBroken(f"the peer sent more than the {expected} bytes asked for")
            write(run, received, piece)
            received += len(piece)
        if received < expected:
            raise CopyBroken(f"the peer sent {received} of {expected} bytes")

    def _write(self, run: Sequence[BlockPair], offset: int, piece: bytes) -> None:
        """Puts bytes that stand `offset` bytes into the run where their blocks lie: pieces know no block borders."""
        data = np.frombuffer(piece, dtype=np.uint8)
        while data.size:
            block, within = divmod(offset, self._block_bytes)
            part = data[: self._block_bytes - within]
            start = run[block].destination * self._block_bytes + within
            self._put(start, part)
            data, offset = data[part.size :], offset + part.size

    def _put(self, start: int, part: npt.NDArray[np.uint8]) -> None:
        if self._array is not None:
            np.copyto(self._array[start : start + part.size], part)
        else:
            self._pool[start : start + part.size].copy_(torch.from_numpy(part.copy()))  # torch knows no read-only array


class BlockCuts:
    """Collects a block of a source that is cut into other parts than our pool, and puts its heads where they belong."""

    def __init__(self, pool: Sequence[torch.Tensor], source: PoolShape, own: PoolShape) -> None:
        self._block = torch.zeros(source.block_bytes, dtype=torch.uint8)
        collected = self._block.view(source.parts, source.rows, source.row_bytes)
        parts = [part.view(own.num_blocks, own.rows, own.row_bytes) for part in pool]
        self._moves = [
            (
                collected[piece.source_part, :, piece.source_offset : piece.source_offset + piece.width],
                parts[piece.destination_part][:, :, piece.destination_offset : piece.destination_offset + piece.width],
            )
            for piece in plan_slices(source, own)
        ]

    def write(self, run: Sequence[BlockPair], offset: int, piece: bytes) -> None:
        """Bytes that stand `offset` bytes into the run."""
        data = np.frombuffer(piece, dtype=np.uint8)
        while data.size:
            index, within = divmod(offset, self._block.numel())
            part = data[: self._block.numel() - within]
            np.copyto(self._block.numpy()[within : within + part.size], part)
            if within + part.size == self._block.numel():
                for heads, place in self._moves:
                    place[run[index].destination].copy_(heads)
            data, offset = data[part.size :], offset + part.size


def compare_beginning(
    link: BlockLink, pool: Storage, source: PoolShape, own: PoolShape, transfer_id: bytes, pair: BlockPair
) -> None:
    """Compare the beginning of a block that another transport copied with the first message of the source.

    Raises: ChecksumDiffers, CopyBroken.
    """
    sent = np.frombuffer(next(filter(None, link.read(transfer_id, pair.logical, 1)), b""), dtype=np.uint8)
    if not sent.size:
        raise CopyBroken("the peer sent nothing")
    parts = parts_of(pool, own)
    for place in landing_places(source, own):
        start = pair.destination * own.part_block_bytes + place.offset
        wanted, sent = sent[: place.width], sent[place.width :]
        if not np.array_equal(parts[place.part][start : start + wanted.size].cpu().numpy(), wanted):
            raise ChecksumDiffers("the first block that came does not begin as its source sends it")
        if not sent.size:
            return


def _logically_adjacent(left: BlockPair, right: BlockPair) -> bool:
    return right.logical == left.logical + 1
