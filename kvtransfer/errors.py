"""Errors between two pools.

TransferError
├── SharedMemoryUnavailable   our memory cannot be shared with peers as requested
├── PeerUnreachable           this transport cannot reach the peer's pool
├── PairingRefused            two pools do not hold the same bytes for the same tokens
├── BlockOutOfRange           a block id outside of a pool
├── CopyBroken                the peer sent more or fewer bytes than requested, or the link broke
│   ├── CopyRefused           the peer refused before it sent anything
│   └── LinkBroken            and the link cannot be used again: pair anew
├── ChecksumDiffers           the copied bytes differ from those of the source
└── UnknownTransfer           the transfer has ended, or never was
"""


class TransferError(Exception):
    """Anything that ends a transfer or forbids a pairing."""


class SharedMemoryUnavailable(TransferError):
    pass


class PeerUnreachable(TransferError):
    pass


class PairingRefused(TransferError):
    """`field` is the field of PoolDescription that does not fit."""

    def __init__(self, field: str, mine: str, theirs: str) -> None:
        super().__init__(f"{field} of the two pools differ: {mine} here, {theirs} there")
        self.field = field


class BlockOutOfRange(TransferError):
    pass


class CopyBroken(TransferError):
    pass


class CopyRefused(CopyBroken):
    pass


class LinkBroken(CopyBroken):
    pass


class ChecksumDiffers(TransferError):
    pass


class UnknownTransfer(TransferError):
    def __init__(self, transfer_id: bytes) -> None:
        super().__init__("the transfer has ended, or was never announced")
        self.transfer_id = transfer_id  # the right to read: not in the message, which may be logged
