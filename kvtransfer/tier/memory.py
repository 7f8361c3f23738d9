"""Segments in host memory: faster than files, between a GPU's pool and them, and gone with the process."""

import errno
import os
import secrets
from collections.abc import Sequence

from baton.kvtransfer.tier.files import ID_BYTES, Claim, RealFile, SegmentId, SegmentSize, TierFile


class _Ours:
    def release(self) -> None:
        """No other process could have had it."""


class HostMemory:
    """A `TierDisk` of this process alone. A segment's memory is free again when its last reader has closed it."""

    def __init__(self) -> None:
        self._id = secrets.token_bytes(ID_BYTES)

    def claim(self, owner: str) -> Claim:
        return _Ours()

    def identify(self) -> bytes:
        return self._id

    def owners(self) -> Sequence[str]:
        return ()

    def segments(self, owner: str) -> Sequence[SegmentSize]:
        """None are found: those of a process before this one are gone."""
        return ()

    def create(self, segment: SegmentId) -> TierFile:
        """Its pages are taken as they are written. Raises: OSError."""
        return RealFile(os.memfd_create(f"baton-tier-{segment.number}", os.MFD_CLOEXEC))

    def open(self, segment: SegmentId, writable: bool) -> TierFile:
        """Raises: FileNotFoundError, always: memory has no name to open it by."""
        raise FileNotFoundError(errno.ENOENT, "segments in memory are open already", str(segment))

    def remove(self, segment: SegmentId) -> None:
        """Its memory goes with the closing of it."""
