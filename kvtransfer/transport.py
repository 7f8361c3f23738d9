"""The interface between a pull and the transport of its bytes, and the errors between two pools.

TransferError
├── SharedMemoryUnavailable   our memory cannot be shared with peers as requested
├── PeerUnreachable           this transport cannot reach the peer's pool
├── PairingRefused            two pools do not hold the same bytes for the same tokens
├── BlockOutOfRange           a block id outside of a pool
├── CopyBroken                the peer sent more or fewer bytes than requested, or the link broke
│   ├── CopyRefused           the peer refused before it sent anything
│   ├── CopyStuck             the device has not ended it in time: it may still write, so that the process must end
│   └── LinkBroken            and the link cannot be used again: pair anew
├── ChecksumDiffers           the copied bytes differ from those of the source
└── UnknownTransfer           the transfer has ended, or never was
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class TransferError(Exception):
    """Anything that ends a transfer or forbids a pairing."""


class SharedMemoryUnavailable(TransferError):
    pass


class PeerUnreachable(TransferError):
    pass


class PairingRefused(TransferError):
    """Error: `field` of PoolDescription does not fit."""

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
        super().__init__("the transfer has ended, or was never announced")
        self.transfer_id = transfer_id  # the right to read: not in the message, which may be logged


class BlockPair(NamedTuple):
    """Block to be pulled. A stream requests it by `logical`, shared memory finds it at `source`."""

    logical: int  # its place in the prompt, from 0
    source: int  # physical block in the peer's pool
    destination: int  # physical block in our own pool


@dataclass(frozen=True, slots=True)
class LinkRate:
    """The bytes moved to measure a link, and the time that they took."""

    bytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes per second."""
        return self.bytes / 1e9 / self.seconds if self.seconds > 0 else 0.0


class Transport(Protocol):
    """Link from a peer's pool to our own. Its methods block: they are called on the pull thread only."""

    @property
    def name(self) -> str:
        """Name in traces and metrics."""

    def copy(self, transfer_id: bytes, pairs: Sequence[BlockPair]) -> int:
        """Copies blocks of one transfer into our pool; returns the number of bytes.

        Raises TransferError. After LinkBroken the link is of no use any more.
        """

    def measure(self, nbytes: int) -> LinkRate:
        """Moves at most `nbytes` of anything, into no pool. Raises TransferError."""

    def close(self) -> None:
        """Lets go of the peer."""


def split_runs(
    pairs: Sequence[BlockPair], adjacent: Callable[[BlockPair, BlockPair], bool]
) -> Iterator[Sequence[BlockPair]]:
    """Cuts `pairs`, in order, into the longest runs whose neighbours are adjacent."""
    start = 0
    for end in range(1, len(pairs) + 1):
        if end == len(pairs) or not adjacent(pairs[end - 1], pairs[end]):
            yield pairs[start:end]
            start = end
