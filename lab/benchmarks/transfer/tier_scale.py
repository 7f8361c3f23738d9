"""How long does a start with many blocks in files take, and how much memory does it cost to know them?

    python -m baton.lab.benchmarks.transfer.tier_scale [--blocks 100000,1000000] [--block-bytes 64] [--json FILE]

Files of one worker with tiny blocks, of which a start reads the headers alone: as many calls as of large ones. A
process of its own opens the store: once with the files in the system's memory, once after the system was asked to
forget them, which with large blocks would take a disk longer: their headers lie further apart.

Then a tenth of the blocks are written by the store itself, whose bound is half of that: `most of its bound` is how much
of it the folder took at most, looked at after every write.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from baton.kvtransfer.tier.files import RealDisk, SegmentId
from baton.kvtransfer.tier.records import IDENTITY_BYTES, NAME_BYTES, SegmentFormat
from baton.kvtransfer.tier.staging import Staging
from baton.kvtransfer.tier.store import SEGMENTS, NamedBlock, TierStore
from baton.lab.benchmarks.report.result import Columns, read_arguments, table, write_result

OWNER = "w"
BATCH_BLOCKS = 64
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Point:
    blocks: int
    open_s: float
    open_cold_s: float
    bytes_per_block: float  # of memory, by how much the process grew
    most_of_bound: float


@dataclass(frozen=True, slots=True)
class Opened:
    blocks: int
    seconds: float
    grown_bytes: int


def names(count: int) -> Iterator[bytes]:
    """As different in their first bytes as hashes are."""
    for number in range(count):
        yield (number * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "little").ljust(NAME_BYTES, b"\0")


def write_headers(directory: Path, form: SegmentFormat, blocks: int) -> None:
    disk = RealDisk(directory)
    disk.claim(OWNER).release()
    of_segment = -(-blocks // SEGMENTS)
    every = list(names(blocks))
    for number, begin in enumerate(range(0, blocks, of_segment), start=1):
        some = every[begin : begin + of_segment]
        file = disk.create(SegmentId(OWNER, number))
        file.write([memoryview(form.header)], 0)
        for slot, name in enumerate(some):
            file.write([memoryview(form.record_header(name, slot))], form.offset(slot))
        file.truncate(form.offset(len(some)))
        file.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def open_store(directory: Path, form: SegmentFormat, bound_bytes: int) -> Opened:
    """In a process that has done nothing before."""
    store = TierStore(RealDisk(directory), OWNER, form, bound_bytes)
    before, began = resident_bytes(), time.monotonic()
    store.open()
    return Opened(len(store), time.monotonic() - began, resident_bytes() - before)


def opened(directory: Path, form: SegmentFormat, blocks: int) -> Opened:
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(open_store, directory, form, 2 * blocks * form.record_bytes).result()


def forget(directory: Path) -> None:
    """The system need not read what it still has in memory: it is asked to drop it."""
    for path in directory.rglob("*.kv"):
        fd = os.open(path, os.O_RDWR)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def most_of_bound(directory: Path, form: SegmentFormat, blocks: int) -> float:
    """Of a store that is given twice as many blocks as it may keep."""
    bound_bytes = blocks // 2 * form.record_bytes
    store, staging = TierStore(RealDisk(directory), OWNER, form, bound_bytes), Staging(1, form.block_bytes)
    store.open()
    every, checksum, most = list(names(blocks)), staging.checksum(0), 0
    for begin in range(0, blocks, BATCH_BLOCKS):
        some = every[begin : begin + BATCH_BLOCKS]
        store.put([NamedBlock(name, checksum, staging.block(0)) for name in some])
        most = max(most, sum(path.stat().st_size for path in (directory / OWNER).glob("*.kv")))
    store.close()
    return most / bound_bytes


def measure(blocks: int, block_bytes: int) -> Point:
    form = SegmentFormat(bytes(IDENTITY_BYTES), block_bytes)
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".tier-scale-") as name:
        directory = Path(name)
        write_headers(directory / "many", form, blocks)
        warm = opened(directory / "many", form, blocks)
        forget(directory / "many")
        cold = opened(directory / "many", form, blocks)
        if (warm.blocks, cold.blocks) != (blocks, blocks):
            raise SystemExit(f"{warm.blocks} and {cold.blocks} blocks were found, of {blocks}")
        bound = most_of_bound(directory / "bounded", form, blocks // 10)
    return Point(blocks, warm.seconds, cold.seconds, warm.grown_bytes / blocks, bound)


COLUMNS: Columns[Point] = {
    "blocks": lambda point: f"{point.blocks:,}",
    "start, files in memory": lambda point: f"{point.open_s:.2f} s",
    "start, files on disk": lambda point: f"{point.open_cold_s:.2f} s",
    "memory a block": lambda point: f"{point.bytes_per_block:.0f} bytes",
    "most of its bound": lambda point: f"{point.most_of_bound:.3f}",
}


def main() -> None:
    options = read_arguments(__doc__, blocks="100000,1000000", block_bytes=64)
    points = [measure(blocks, options.block_bytes) for blocks in map(int, options.blocks.split(","))]
    print(table(points, COLUMNS))
    write_result(options.json, {"block_bytes": options.block_bytes, "points": [asdict(point) for point in points]})


if __name__ == "__main__":
    main()
