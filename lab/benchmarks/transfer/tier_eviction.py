"""Does the tier keep the blocks that are wanted again, though it removes them by segments? Its own store is measured.

    .venv/bin/python -m baton.lab.benchmarks.transfer.tier_eviction [--shapes chat,agents,documents] [--json FILE]

One worker gets the prompts of a trace of `baton bench route --shape`, one by one. Each looks its blocks up in a pool
(least recently used first), then in files, whose bound is a multiple of the pool; what neither has is computed,
published and written. Blocks are tiny. All figures are shares of all blocks of all prompts that were found.

`pool`: without files. `files`: with them, as the store is. `lru`: one cache of as many blocks as the files, which loses
single blocks, the least recently used first; `lru of both`: of as many as pool and files have together. Those are what
might be had; files have most of what the pool has, too, so that it survives.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.kvtransfer.tier.files import RealDisk
from baton.kvtransfer.tier.records import IDENTITY_BYTES, NAME_BYTES, SegmentFormat
from baton.kvtransfer.tier.staging import Staging
from baton.kvtransfer.tier.store import NamedBlock, TierStore
from baton.lab.benchmarks.placement.simulation import BlockCache, pooled_hit_rate
from baton.lab.benchmarks.placement.traces import Arrival, make_trace
from baton.lab.benchmarks.report.result import Columns, read_arguments, table, write_result

FORMAT = SegmentFormat(bytes(IDENTITY_BYTES), 64)
BATCH_BLOCKS = 64


@dataclass(frozen=True)
class Point:
    shape: str
    times: int  # the bound of the files, in pools
    pool: float
    files: float
    lru: float
    lru_of_both: float


class Worker:
    def __init__(self, store: TierStore, pool_blocks: int) -> None:
        self._store = store
        self._pool = BlockCache(pool_blocks)
        self._staging = Staging(BATCH_BLOCKS, FORMAT.block_bytes)
        self._checksum = self._staging.checksum(0)

    def found(self, blocks: Sequence[bytes]) -> int:
        """Takes a prompt; how many of its blocks were found."""
        cached = self._pool.hit_blocks(blocks)
        found = cached + self._load(blocks[cached:])
        self._pool.insert(blocks)
        data = self._staging.block(0)
        self._store.put([NamedBlock(each, self._checksum, data) for each in blocks[found:]])
        return found

    def _load(self, blocks: Sequence[bytes]) -> int:
        right = 0
        for begin in range(0, len(blocks), BATCH_BLOCKS):
            wanted = blocks[begin : begin + BATCH_BLOCKS]
            read = self._store.load(wanted, self._staging)
            right += self._store.verify(wanted[:read], self._staging)
            if right < begin + len(wanted):
                break
        return right


def hit_rate(prompts: Sequence[Sequence[bytes]], pool_blocks: int, times: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        store = TierStore(RealDisk(Path(directory)), "w", FORMAT, times * pool_blocks * FORMAT.record_bytes)
        store.open()
        worker = Worker(store, pool_blocks)
        found = sum(map(worker.found, prompts))
        store.close()
    return found / sum(map(len, prompts))


def measure(shape: str, times: int, arrivals: Sequence[Arrival]) -> Point:
    pool_blocks = sum(len(each.blocks) for each in arrivals) // 200
    prompts = [[each.ljust(NAME_BYTES, b"\0") for each in arrival.blocks] for arrival in arrivals]
    return Point(
        shape,
        times,
        pooled_hit_rate(arrivals, pool_blocks),
        hit_rate(prompts, pool_blocks, times),
        pooled_hit_rate(arrivals, times * pool_blocks),
        pooled_hit_rate(arrivals, (1 + times) * pool_blocks),
    )


COLUMNS: Columns[Point] = {
    "shape": lambda point: point.shape,
    "files, in pools": lambda point: point.times,
    "pool": lambda point: f"{point.pool:.3f}",
    "files": lambda point: f"{point.files:.3f}",
    "lru": lambda point: f"{point.lru:.3f}",
    "lru of both": lambda point: f"{point.lru_of_both:.3f}",
}


def main() -> None:
    options = read_arguments(__doc__, shapes="chat,agents,documents,tenants", times="2,5", prompts=1500)
    points = []
    for shape in options.shapes.split(","):
        arrivals = make_trace(shape)[: options.prompts]
        points += [measure(shape, times, arrivals) for times in map(int, options.times.split(","))]
        print(table(points, COLUMNS), flush=True)
    write_result(options.json, {"points": [asdict(point) for point in points]})


if __name__ == "__main__":
    main()
