"""List and clear the files of --kv-tier-dir (`baton cache`). Reads only headers."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.cli.options import format_bytes
from baton.kvtransfer.tier.files import OwnerBusy, RealDisk, SegmentSize
from baton.kvtransfer.tier.records import HEADER_BYTES, SegmentFormat, read_segment_header
from baton.launch import CommandFailed

IDENTITY_SHOWN = 12  # number of hexadecimal digits of a model identity


@dataclass(frozen=True, slots=True)
class SegmentLine:
    """One file in the output of `baton cache ls`."""

    worker: str
    segment: int
    size_bytes: int
    blocks: int
    block_bytes: int  # bytes per block; 0 for a damaged header
    model: str  # first digits of the identity of model, KV layout and dtypes


@dataclass(frozen=True, slots=True)
class OwnerLine:
    """One worker in the output of `baton cache du`."""

    worker: str
    runs: bool
    files: int
    size_bytes: int
    blocks: int


def show_segments(directory: Path, as_json: bool) -> None:
    """Print the files. Raises: CommandFailed."""
    with _opened(directory) as disk:
        for line in (_line(disk, found) for owner in disk.owners() for found in disk.segments(owner)):
            if as_json:
                print(json.dumps(asdict(line)))
                continue
            content = (
                f"{line.blocks} blocks of {format_bytes(line.block_bytes)}" if line.block_bytes else "not readable"
            )
            print(f"{line.worker:<20} {line.segment:>8} {format_bytes(line.size_bytes):>10}  {content}  {line.model}")


def show_owners(directory: Path, as_json: bool) -> None:
    """Print the workers with files. Raises: CommandFailed."""
    total_bytes = 0
    with _opened(directory) as disk:
        for owner in disk.owners():
            files = [_line(disk, found) for found in disk.segments(owner)]
            size_bytes, blocks = sum(each.size_bytes for each in files), sum(each.blocks for each in files)
            runs, total_bytes = _runs(disk, owner), total_bytes + size_bytes
            if as_json:
                print(json.dumps(asdict(OwnerLine(owner, runs, len(files), size_bytes, blocks))))
            else:
                state = "runs" if runs else "does not run"
                print(f"{owner:<20} {format_bytes(size_bytes):>10} {blocks:>9} blocks  {state}")
    if not as_json:
        print(f"{'all':<20} {format_bytes(total_bytes):>10}")


def clear_owners(directory: Path, worker: str | None) -> int:
    """Remove files; return 1 if a running worker kept its own, else 0. Raises: CommandFailed."""
    kept = False
    with _opened(directory) as disk:
        owners = [owner for owner in disk.owners() if worker in (None, owner)]
        if worker is not None and not owners:
            raise CommandFailed(f"{directory} has no files of {worker}")
        for owner in owners:
            try:
                release = disk.claim(owner)
            except OwnerBusy:
                print(f"{owner} is running: its files are kept", file=sys.stderr)
                kept = True
                continue
            try:
                found = disk.segments(owner)
                for each in found:
                    disk.remove(each.segment)
            finally:
                release()
            print(f"{owner}: {len(found)} files of {format_bytes(sum(each.size_bytes for each in found))} removed")
    return 1 if kept else 0


@contextmanager
def _opened(directory: Path) -> Iterator[RealDisk]:
    """Open a directory of --kv-tier-dir. Raises: CommandFailed, also for an OSError inside the `with` block."""
    if not directory.is_dir():
        raise CommandFailed(f"{directory} is not a directory")
    try:
        yield RealDisk(directory)
    except OSError as error:
        raise CommandFailed(f"{error.filename or directory}: {error.strerror or error}") from error


def _line(disk: RealDisk, found: SegmentSize) -> SegmentLine:
    raw = bytearray(HEADER_BYTES)
    file = disk.open(found.segment, writable=False)
    try:
        file.read([memoryview(raw)], 0)
    finally:
        file.close()
    header = read_segment_header(bytes(raw))
    owner, number = found.segment
    if header is None:
        return SegmentLine(owner, number, found.size_bytes, 0, 0, "")
    blocks = SegmentFormat(*header).slots(found.size_bytes)
    model = header.identity.hex()[:IDENTITY_SHOWN]
    return SegmentLine(owner, number, found.size_bytes, blocks, header.block_bytes, model)


def _runs(disk: RealDisk, owner: str) -> bool:
    try:
        disk.claim(owner)()
    except OwnerBusy:
        return True
    return False
