"""Damage to KV files by another process: flipped bits, truncation, garbage, KV of another model under valid names."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from baton.kvtransfer.tier.files import RealDisk, SegmentId
from baton.kvtransfer.tier.records import HEADER_BYTES, SegmentFormat, read_segment_header
from baton.kvtransfer.tier.staging import Staging

EVERY_BYTES = 4096
GARBAGE_BYTES = 200_000
STRANGER = "stranger"
COPIES = 8
OTHER_MODEL = b"another model, 32 bytes in all .."[:32]


class Damage(NamedTuple):
    files: int
    places: int  # number of damaged bits, bytes or blocks


def segment_paths(directory: Path, owner: str = "*") -> list[Path]:
    """Return the paths of segment files, sorted. `owner`: name of the worker that wrote them; `*`: all workers."""
    return sorted(directory.glob(f"{owner}/*.kv"))


def flip_bits(paths: list[Path], draw: random.Random) -> Damage:
    """Flip one bit per EVERY_BYTES, in place, so that workers with open files read flipped bits. Raises: OSError."""
    files = places = 0
    for path in _there(paths):
        with path.open("r+b") as file:
            raw = bytearray(file.read())
            at = HEADER_BYTES + draw.randrange(EVERY_BYTES)  # after the segment header, which stays valid
            for place in range(at, len(raw), EVERY_BYTES):
                file.seek(place)
                file.write(bytes((raw[place] ^ 1 << draw.randrange(8),)))
                places += 1
        files += 1
    return Damage(files, places)


def cut_off(paths: list[Path], draw: random.Random) -> Damage:
    """Cut each file off at a random length. Raises: OSError."""
    files = lost = 0
    for path in _there(paths):
        size = path.stat().st_size
        kept = draw.randrange(size + 1)
        with path.open("r+b") as file:
            file.truncate(kept)
        files, lost = files + 1, lost + size - kept
    return Damage(files, lost)


def add_garbage(paths: list[Path], draw: random.Random) -> Damage:
    """Append garbage to each file. Raises: OSError."""
    files = added = 0
    for path in _there(paths):
        garbage = draw.randbytes(draw.randrange(1, GARBAGE_BYTES))
        with path.open("ab") as file:
            file.write(garbage)
        files, added = files + 1, added + len(garbage)
    return Damage(files, added)


def add_other_model(directory: Path, draw: random.Random) -> Damage:
    """Rewrite some segments as another model's: same block names, other identity, random KV, valid checksums.

    Each rewritten segment is stored twice: in a separate folder, and in the folder of the original's owner. A worker
    that ignored the identity would generate wrong tokens.

    Raises: OSError.
    """
    files = blocks = 0
    disk = RealDisk(directory)
    disk.claim(STRANGER)()
    of_workers = [path for path in segment_paths(directory) if path.parent.name != STRANGER]
    for path in _there(draw.sample(of_workers, len(of_workers))):
        raw = path.read_bytes()
        header = read_segment_header(raw[:HEADER_BYTES])
        if header is None or header.identity == OTHER_MODEL:
            continue
        ours, theirs = (SegmentFormat(each, header.block_bytes) for each in (header.identity, OTHER_MODEL))
        records = list(_rewritten(raw, ours, theirs, draw))
        for owner in (STRANGER, path.parent.name):
            number = max((each.segment.number for each in disk.segments(owner)), default=0)
            file = disk.create(SegmentId(owner, number + 1))  # the owner's next segment number
            try:
                file.write([memoryview(each) for each in (theirs.header, *records)], 0)
            finally:
                file.close()
            files, blocks = files + 1, blocks + len(records)
        if files >= COPIES:
            break
    return Damage(files, blocks)


def _rewritten(raw: bytes, ours: SegmentFormat, theirs: SegmentFormat, draw: random.Random) -> Iterator[bytes]:
    """Yield the segment's records with the same names, but random bytes and the checksums of these bytes."""
    staging = Staging(1, ours.block_bytes)
    for slot in range(ours.slots(len(raw))):
        at = ours.offset(slot)
        header = ours.read_record_header(raw[at : at + HEADER_BYTES])
        if header is not None:
            staging.block(0)[:] = draw.randbytes(ours.block_bytes)
            yield theirs.record_header(header.name, staging.checksum(0)) + bytes(staging.block(0))


def _there(paths: list[Path]) -> Iterator[Path]:
    """Yield the paths that still exist: workers may remove files at any time."""
    for path in paths:
        if path.is_file():
            yield path
