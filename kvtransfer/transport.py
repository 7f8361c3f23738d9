"""Interface of the transports that copy KV between two pools, and their errors.

TransferError
├── SharedMemoryUnavailable   this pool cannot be shared with peers as requested
├── PeerUnreachable           this transport cannot reach the peer's pool
├── PairingRefused            two pools store different bytes for the same tokens
├── BlockOutOfRange           a block id is outside of a pool
├── CopyBroken                the peer sent more or fewer bytes than requested, or the link broke
│   ├── CopyRefused           the peer refused before it sent anything
│   ├── CopyStuck             the device did not finish in time and may still write: the process must end
│   └── LinkBroken            the link cannot be used again: pair again
├── ChecksumDiffers           copied bytes differ from the source's
└── UnknownTransfer           the transfer has ended or was never announced
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class TransferError(Exception):
    """Base class of the errors that end a transfer or forbid a pairing of two workers."""


class SharedMemoryUnavailable(TransferError):
    pass


class PeerUnreachable(TransferError):
    pass


class PairingRefused(TransferError):
    """Error: two workers cannot be paired, because a field of their pools' descriptions differs."""

    def __init__(self, field: str, mine: str, theirs: str) -> None:
        super().__init__(f"{field} of the two pools differ: {mine} here, {theirs} there")
        self.field = field


class BlockOutOfRange(TransferError):
    pass


class CopyBroken(TransferError):
    pass


class CopyRefused(CopyBroken):
    pass


class CopyStuck(CopyBroken):
    pass


class LinkBroken(CopyBroken):
    pass


class ChecksumDiffers(TransferError):
    pass


class UnknownTransfer(TransferError):
    def __init__(self, transfer_id: bytes) -> None:
        super().__init__("the transfer has ended or was never announced")
        self.transfer_id = transfer_id  # omitted from the message, since logs must not show it: it permits reads


class BlockPair(NamedTuple):
    """Block to copy. `logical` serves transports that send requests, `source` those that read the peer's memory."""

    logical: int  # index in the prompt, from 0
    source: int  # physical block in the peer's pool
    destination: int  # physical block in this worker's pool


@dataclass(frozen=True, slots=True)
class LinkRate:
    """Number of bytes that a link moved, and the time that this took."""

    bytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """Rate in 10^9 bytes per second."""
        return self.bytes / 1e9 / self.seconds if self.seconds > 0 else 0.0


class Transport(Protocol):
    """Link from a peer's pool to this worker's. Methods block; only the pull thread calls them."""

    @property
    def name(self) -> str:
        """Name of the transport in traces and metrics."""

    def copy(self, transfer_id: bytes, pairs: Sequence[BlockPair]) -> int:
        """Copy blocks of one transfer into this pool; return the number of bytes.

        Raises: TransferError. After LinkBroken the link cannot be used again.
        """

    def measure(self, nbytes: int) -> LinkRate:
        """Measure the link: move at most `nbytes` arbitrary bytes into scratch memory. Raises: TransferError."""

    def close(self) -> None:
        """Close the link and release the resources that it has at the peer."""


def check_destinations(pairs: Sequence[BlockPair], own_blocks: int) -> None:
    """Check that all destinations of `pairs` are blocks of this pool. Raises: BlockOutOfRange."""
    for pair in pairs:
        if not 0 <= pair.destination < own_blocks:
            raise BlockOutOfRange(f"{pair}: the destination is outside of the pool's {own_blocks} blocks")


def logical_runs(pairs: Sequence[BlockPair]) -> Iterator[Sequence[BlockPair]]:
    """Split `pairs`, in order, into runs of consecutive logical blocks. A transport sends one request per run."""
    return split_runs(pairs, lambda left, right: right.logical == left.logical + 1)


def split_runs(
    pairs: Sequence[BlockPair], adjacent: Callable[[BlockPair, BlockPair], bool]
) -> Iterator[Sequence[BlockPair]]:
    """Split `pairs`, in order, into the longest runs in which `adjacent` is true for each pair and the next one."""
    start = 0
    for end in range(1, len(pairs) + 1):
        if end == len(pairs) or not adjacent(pairs[end - 1], pairs[end]):
            yield pairs[start:end]
            start = end
