"""Messages of a KV connection: requests of fixed size, each answered by a header and the bytes that it announces.

Numbers are little-endian. The bytes of a block are sent part by part, in the order of the parts of the source's pool.
"""

import struct
from enum import IntEnum
from typing import NamedTuple

MAGIC = b"BATONKV1"
ID_BYTES = 16
MAX_PROBE_BYTES = 64 << 20
REQUEST = struct.Struct("<8sB16s16sQQ")  # magic, and the fields of `BlockRequest`
HEAD = struct.Struct("<BQ")  # verdict, and the number of bytes that follow


class What(IntEnum):
    BLOCKS = 0  # `number` logical blocks of a transfer, from block `first` on
    PROBE = 1  # `number` arbitrary bytes, to measure the link


class Verdict(IntEnum):
    """Result of a request. Only SENT is followed by the requested bytes."""

    SENT = 0
    UNKNOWN_TRANSFER = 1
    OUT_OF_RANGE = 2
    POOL_REPLACED = 3
    UNAVAILABLE = 4


REASONS = {
    Verdict.UNKNOWN_TRANSFER: "the transfer has ended or was never announced",
    Verdict.OUT_OF_RANGE: "the range exceeds the readable blocks",
    Verdict.POOL_REPLACED: "the pool that the reader paired with is gone",
    Verdict.UNAVAILABLE: "the source is stopping or does not respond",
}


class BlockRequest(NamedTuple):
    what: What
    pool_id: bytes
    transfer_id: bytes
    first: int
    number: int


class Head(NamedTuple):
    verdict: Verdict
    size_bytes: int


def write_request(request: BlockRequest) -> bytes:
    return REQUEST.pack(MAGIC, *request)


def read_request(data: bytes | bytearray) -> BlockRequest:
    """Parse a request. Raises: ValueError."""
    magic, what, *rest = REQUEST.unpack(data)
    if magic != MAGIC:
        raise ValueError(f"a request for KV must begin with {MAGIC!r}, got {magic!r}")
    return BlockRequest(What(what), *rest)


def write_head(head: Head) -> bytes:
    return HEAD.pack(*head)


def read_head(data: bytes | bytearray) -> Head:
    """Parse a response header. Raises: ValueError."""
    verdict, size_bytes = HEAD.unpack(data)
    return Head(Verdict(verdict), size_bytes)
