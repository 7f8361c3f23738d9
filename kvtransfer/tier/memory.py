"""Segments in host memory, which are faster than files but lost with the process."""

import errno
import os
import secrets
from collections.abc import Sequence

from baton.kvtransfer.tier.files import ID_BYTES, RealFile, Release, SegmentId, SegmentSize, TierFile


class MemoryDisk:
    """A `TierDisk` in the memory of this process. Closing a segment frees its memory."""

    def __init__(self) -> None:
        self._id = secrets.token_bytes(ID_BYTES)

    def claim(self, owner: str) -> Release:
        """Return a function that does nothing, since no other process can claim the folder."""
        return lambda: None

    def identify(self) -> bytes:
        return self._id

    def owners(self) -> Sequence[str]:
        return ()

    def segments(self, owner: str) -> Sequence[SegmentSize]:
        """Return an empty list, since segments of an earlier process are gone."""
        return ()

    def create(self, segment: SegmentId) -> TierFile:
        """Create a segment. Its memory pages are allocated when they are written. Raises: OSError."""
        return RealFile(os.memfd_create(f"baton-tier-{segment.number}", os.MFD_CLOEXEC))

    def open(self, segment: SegmentId, writable: bool) -> TierFile:
        """Raise FileNotFoundError, since a segment in memory cannot be opened by name."""
        raise FileNotFoundError(errno.ENOENT, "a segment in memory cannot be opened by name", str(segment))

    def remove(self, segment: SegmentId) -> None:
        """Do nothing, since closing the segment frees its memory."""
