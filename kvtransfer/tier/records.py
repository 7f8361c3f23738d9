"""Binary format of a segment. Pure.

    segment  =  header of 64 bytes, record, record, ...          the first of them says whose KV it is
    record   =  header of 64 bytes, the block's bytes            all of one length: a place is a number

Each header ends with its own CRC-32, begun with the segment's identity, so that a record under another identity, or
with a flipped bit in its name or checksum, is none. The checksum of the block itself is that of kvtransfer/checksum.py.
"""

import struct
import zlib
from dataclasses import dataclass
from typing import NamedTuple

HEADER_BYTES = 64
NAME_BYTES = 32
IDENTITY_BYTES = 32
_HEADER = struct.Struct("<8s32sQ12x")  # magic; name or identity; checksum or bytes of a block
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
    """Return both values of a header; None if it is not valid."""
    if len(raw) != HEADER_BYTES or not raw.startswith(magic):
        return None
    begin, crc = raw[: _HEADER.size], raw[_HEADER.size :]
    if _CRC.pack(zlib.crc32(begin, seed)) != crc:
        return None
    _, value, number = _HEADER.unpack(begin)
    return value, number


def read_segment_header(raw: bytes) -> SegmentHeader | None:
    """Parse a segment header; None if it is not a segment, or damaged."""
    found = _opened(raw, _SEGMENT, 0)
    return None if found is None else SegmentHeader(*found)


@dataclass(frozen=True, slots=True)
class SegmentFormat:
    """Format of segments with one identity. The identity covers everything that changes the bytes of a block of a given
    name.
    """

    identity: bytes  # 32 bytes
    block_bytes: int

    @property
    def record_bytes(self) -> int:
        return HEADER_BYTES + self.block_bytes

    @property
    def header(self) -> bytes:
        return _sealed(_HEADER.pack(_SEGMENT, self.identity, self.block_bytes), 0)

    def offset(self, slot: int) -> int:
        """Return the offset of the record at that slot."""
        return HEADER_BYTES + slot * self.record_bytes

    def slots(self, size_bytes: int) -> int:
        """Return the number of complete records in a segment of that size."""
        return max(0, size_bytes - HEADER_BYTES) // self.record_bytes

    def is_ours(self, raw: bytes) -> bool:
        """Return whether a segment with this header has KV of this identity."""
        return read_segment_header(raw) == (self.identity, self.block_bytes)

    def record_header(self, name: bytes, checksum: int) -> bytes:
        """Return a record header. `checksum`: of the block, [0, 2^64)."""
        return _sealed(_HEADER.pack(_RECORD, name, checksum), self._seed)

    def read_record_header(self, raw: bytes) -> RecordHeader | None:
        """Parse a record header; None if it is damaged, torn, or of another identity."""
        found = _opened(raw, _RECORD, self._seed)
        return None if found is None else RecordHeader(*found)

    @property
    def _seed(self) -> int:
        return zlib.crc32(self.identity)
