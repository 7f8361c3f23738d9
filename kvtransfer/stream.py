"""KV copies as a stream of bytes over gRPC: the slowest transport, which works between any two workers.

This is the only transport between hosts for workers of release 0.1.0, and for GPU pools without NIXL and NCCL. The
module itself does not depend on gRPC.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from baton.kvtransfer.slices import PoolShape, Storage, landing_places, parts_of
from baton.kvtransfer.transport import (
    BlockPair,
    ChecksumDiffers,
    CopyBroken,
    LinkRate,
    check_destinations,
    logical_runs,
)


class BlockLink(Protocol):
    """Connection to the source, used by the pull thread. Every wait is bounded. Raises: TransferError.

    Bytes arrive in order, in chunks of any size.
    """

    def read(self, transfer_id: bytes, first_block: int, num_blocks: int) -> Iterable[bytes]:
        """Yield the bytes of logical blocks in order. The parts of a block in the source's pool follow one another."""

    def probe(self, nbytes: int) -> Iterable[bytes]:
        """Yield `nbytes` arbitrary bytes."""


class StreamTransport:
    """Transport over a stream of bytes. `pool`: this worker's pool, on any devices. `link` is closed by its creator."""

    name = "grpc"

    def __init__(self, link: BlockLink, pool: Storage, source: PoolShape, own: PoolShape) -> None:
        self._link = link
        self._own = own
        self._parts = parts_of(pool, own)
        self._places = landing_places(source, own)

    def copy(self, transfer_id: bytes, pairs: Sequence[BlockPair]) -> int:
        """Pull blocks. Raises: CopyBroken; BlockOutOfRange, before any request."""
        check_destinations(pairs, self._own.num_blocks)
        for run in logical_runs(pairs):
            self._fill(run, self._link.read(transfer_id, run[0].logical, len(run)))
        for part in self._parts:
            if part.is_cuda:
                torch.cuda.current_stream(part.device).synchronize()  # wait for the copies, which are asynchronous
        return len(pairs) * self._own.block_bytes

    def measure(self, nbytes: int) -> LinkRate:
        """Measure the link. Raises: CopyBroken."""
        started = time.monotonic()
        received = sum(map(len, self._link.probe(nbytes)))
        if received != nbytes:
            raise CopyBroken(f"the peer sent {received} of {nbytes} bytes")
        return LinkRate(nbytes, time.monotonic() - started)

    def close(self) -> None:
        """Do nothing: the transport owns no resource of the peer."""

    def _fill(self, run: Sequence[BlockPair], pieces: Iterable[bytes]) -> None:
        """Write received bytes to the blocks of `run` in order. Raises: CopyBroken for too many or too few bytes."""
        expected, received = len(run) * self._own.block_bytes, 0
        destinations = self._destinations(run)
        destination = next(destinations)
        for piece in pieces:
            data = np.frombuffer(piece, dtype=np.uint8)
            received += data.size
            if received > expected:
                raise CopyBroken(f"the peer sent more than the requested {expected} bytes")
            while data.size:
                if not destination.numel():
                    destination = next(destinations)
                size = min(data.size, destination.numel())
                _put(destination[:size], data[:size])
                data, destination = data[size:], destination[size:]
        if received < expected:
            raise CopyBroken(f"the peer sent {received} of {expected} bytes")

    def _destinations(self, run: Sequence[BlockPair]) -> Iterator[torch.Tensor]:
        for pair in run:
            start = pair.destination * self._own.part_block_bytes
            for part, offset, width in self._places:
                yield self._parts[part][start + offset : start + offset + width]


def _put(destination: torch.Tensor, data: npt.NDArray[np.uint8]) -> None:
    if destination.device.type == "cpu":
        np.copyto(destination.numpy(), data)  # copies on this thread alone, unlike torch
    else:
        destination.copy_(torch.from_numpy(data.copy()))  # torch has no read-only tensors, as `data` is


def compare_beginning(
    link: BlockLink, pool: Storage, source: PoolShape, own: PoolShape, transfer_id: bytes, pair: BlockPair
) -> None:
    """Compare the first bytes of a block, as copied by another transport, with the same bytes sent over `link`.

    Raises: ChecksumDiffers, CopyBroken.
    """
    sent = np.frombuffer(next(filter(None, link.read(transfer_id, pair.logical, 1)), b""), dtype=np.uint8)
    if not sent.size:
        raise CopyBroken("the peer sent no bytes of the block to compare")
    parts = parts_of(pool, own)
    for place in landing_places(source, own):
        start = pair.destination * own.part_block_bytes + place.offset
        wanted, sent = sent[: place.width], sent[place.width :]
        if not np.array_equal(parts[place.part][start : start + wanted.size].cpu().numpy(), wanted):
            raise ChecksumDiffers("the beginning of the first copied block differs from the source's")
        if not sent.size:
            return
