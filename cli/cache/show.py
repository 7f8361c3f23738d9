"""List and clear the files of --kv-tier-dir (`baton cache`). Reads only headers."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.cli.options import format_bytes
from baton.kvtransfer.tier.files import OwnerBusy, RealDisk, SegmentSize
from baton.kvtransfer.tier.records import HEADER_BYTES, SegmentFormat, read_segment_header
from baton.launch import CommandFailed

IDENTITY_SHOWN = 12  # hexadecimal digits


@dataclass(frozen=True, slots=True)
class SegmentLine:
    """File in `ls`."""

    worker: str
    segment: int
    size_bytes: int
    blocks: int
    block_bytes: int  # 0: no segment, or a damaged header
    model: str  # prefix of the identity of model, layout and types


@dataclass(frozen=True, slots=True)
class OwnerLine:
    """Worker in `du`."""

    worker: str
    runs: bool
    files: int
    size_bytes: int
    blocks: int


def segment_lines(disk: RealDisk) -> Iterator[SegmentLine]:
    """Yield all files. Raises: OSError."""
    for owner in disk.owners():
        for found in disk.segments(owner):
            yield _line(disk, found)


def owner_lines(disk: RealDisk) -> list[OwnerLine]:
    """Return all workers with files. Raises: OSError."""
    lines = []
    for owner in disk.owners():
        files = [_line(disk, found) for found in disk.segments(owner)]
        size_bytes, blocks = sum(each.size_bytes for each in files), sum(each.blocks for each in files)
        lines.append(OwnerLine(owner, _runs(disk, owner), len(files), size_bytes, blocks))
    return lines


def show_segments(directory: Path, as_json: bool) -> None:
    """Print the files. Raises: CommandFailed."""
    try:
        for line in segment_lines(_disk(directory)):
            if as_json:
                print(json.dumps(asdict(line)))
            else:
                held = (
                    f"{line.blocks} blocks of {format_bytes(line.block_bytes)}" if line.block_bytes else "not readable"
                )
                print(f"{line.worker:<20} {line.segment:>8} {format_bytes(line.size_bytes):>10}  {held}  {line.model}")
    except OSError as error:
        raise _failed(error) from error


def show_owners(directory: Path, as_json: bool) -> None:
    """Print the workers. Raises: CommandFailed."""
    try:
        lines = owner_lines(_disk(directory))
    except OSError as error:
        raise _failed(error) from error
    for line in lines:
        if as_json:
            print(json.dumps(asdict(line)))
        else:
            runs = "runs" if line.runs else "does not run"
            print(f"{line.worker:<20} {format_bytes(line.size_bytes):>10} {line.blocks:>9} blocks  {runs}")
    if not as_json:
        print(f"{'all':<20} {format_bytes(sum(line.size_bytes for line in lines)):>10}")


def clear_owners(directory: Path, worker: str | None) -> int:
    """Remove files; return 1 if a running worker kept its own, else 0. Raises: CommandFailed."""
    disk, left = _disk(directory), 0
    try:
        owners = [owner for owner in disk.owners() if worker in (None, owner)]
        if worker is not None and not owners:
            raise CommandFailed(f"{directory} has no files of {worker}")
        for owner in owners:
            try:
                claim = disk.claim(owner)
            except OwnerBusy:
                print(f"{owner} is running: its files are kept", file=sys.stderr)
                left += 1
                continue
            try:
                found = disk.segments(owner)
                for each in found:
                    disk.remove(each.segment)
            finally:
                claim.release()
            print(f"{owner}: {len(found)} files of {format_bytes(sum(each.size_bytes for each in found))} removed")
    except OSError as error:
        raise _failed(error) from error
    return 1 if left else 0


def _disk(directory: Path) -> RealDisk:
    if not directory.is_dir():
        raise CommandFailed(f"{directory} is not a directory")
    return RealDisk(directory)


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
        disk.claim(owner).release()
    except OwnerBusy:
        return True
    return False


def _failed(error: OSError) -> CommandFailed:
    return CommandFailed(f"{error.filename or 'the directory'}: {error.strerror or error}")
