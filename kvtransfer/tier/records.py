"""Binary format of a segment. Pure.

    segment  =  header of 64 bytes with the identity, then records of equal length, numbered by slot
    record   =  header of 64 bytes with name and checksum, then the block's bytes

Each header ends with a CRC-32 over the segment's identity and the header: a record of another identity, or with a
flipped bit in its name or checksum, counts as damaged. kvtransfer/checksum.py defines the checksum of a block.
"""

import struct
import zlib
from dataclasses import dataclass
from typing import NamedTuple

HEADER_BYTES = 64
_HEADER = struct.Struct("<8s32sQ12x")  # magic; record: name, checksum; segment: identity, block_bytes
_CRC = struct.Struct("<I")
_SEGMENT, _RECORD = b"BATONKV1", b"KVBLOCK1"


class RecordHeader(NamedTuple):
    name: bytes
    checksum: int


class SegmentHeader(NamedTuple):
    identity: bytes
    block_bytes: int


def _sealed(begin: bytes, seed: int) -> bytes:
    return begin + _CRC.pack(zlib.crc32(begin, seed))


def _opened(raw: bytes, magic: bytes, seed: int) -> tuple[bytes, int] | None:
    """Return the two values of a header after its magic; None if the header is invalid."""
    if len(raw) != HEADER_BYTES or not raw.startswith(magic):
        return None
    begin, crc = raw[: _HEADER.size], raw[_HEADER.size :]
    if _CRC.pack(zlib.crc32(begin, seed)) != crc:
        return None
    _, value, number = _HEADER.unpack(begin)
    return value, number


def read_segment_header(raw: bytes) -> SegmentHeader | None:
    """Parse a segment header; None if the file is not a segment, or the header is damaged."""
    found = _opened(raw, _SEGMENT, 0)
    return None if found is None else SegmentHeader(*found)


@dataclass(frozen=True, slots=True)
class SegmentFormat:
    """Format of segments with one identity: a digest of all that determines a block's bytes besides its name."""

    identity: bytes  # 32 bytes
    block_bytes: int

    @property
    def record_bytes(self) -> int:
        return HEADER_BYTES + self.block_bytes

    @property
    def header(self) -> bytes:
        return _sealed(_HEADER.pack(_SEGMENT, self.identity, self.block_bytes), 0)

    def offset(self, slot: int) -> int:
        """Return the offset of the slot's record in the segment, in bytes."""
        return HEADER_BYTES + slot * self.record_bytes

    def slots(self, size_bytes: int) -> int:
        """Return the number of complete records in a segment of `size_bytes`."""
        return max(0, size_bytes - HEADER_BYTES) // self.record_bytes

    def is_ours(self, raw: bytes) -> bool:
        """Return whether a segment with this header has KV of this identity."""
        return read_segment_header(raw) == (self.identity, self.block_bytes)

    def record_header(self, name: bytes, checksum: int) -> bytes:
        """Return a record header. `checksum`: the block's checksum, [0, 2^64)."""
        return _sealed(_HEADER.pack(_RECORD, name, checksum), self._seed)

    def read_record_header(self, raw: bytes) -> RecordHeader | None:
        """Parse a record header; None if it is damaged, incomplete, or of another identity."""
        found = _opened(raw, _RECORD, self._seed)
        return None if found is None else RecordHeader(*found)

    @property
    def _seed(self) -> int:
        return zlib.crc32(self.identity)
