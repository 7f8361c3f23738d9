"""How soon after `kill -9` and a restart a prompt has its first token: from files of --kv-tier-dir, or computed.

    .venv/bin/python -m baton.lab.benchmarks.transfer.tier_restart --model FOLDER [--tokens 2048,8128] [--json FILE]

A prefill worker computes new prompts and writes their KV behind; it is killed with SIGKILL. The next one, on the same
directory, gets the same prompts: once with the files thrown out of the system's memory (cold), so that every byte
comes from the disk, and once with the files in it (warm). The time of a prompt goes from the sending of its command to
its first token. `disk` is reading as many bytes of those files, thrown out of memory, in order and in large pieces, and
nothing else. Medians. Every worker has computed and loaded a prompt before, so that nothing is measured for the first
time; its pool is emptied by prompts between measurements only where that is said.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from baton.kvtransfer.tier.records import HEADER_BYTES, read_segment_header
from baton.lab.benchmarks.report.result import Columns, read_arguments, table, write_result
from baton.lab.benchmarks.transfer.worker_pair import (
    BLOCK_TOKENS,
    WorkerSession,
    make_command,
    new_prompt,
    worker_process,
)
from baton.protos import session_pb2

WORKER = "prefill-0"
READ_BYTES = 8 << 20
STORED_S = 60.0
UNREAD = ("--lease-s", 300)  # no decode worker reads these prompts
FLAGS = ("--worker-id", WORKER, "--kv-memory", "2GiB", "--chunk-tokens", 512, "--kv-tier-load", "always", *UNREAD)


@dataclass(frozen=True)
class Point:
    """A length of prompt; medians in milliseconds."""

    tokens: int
    bytes: int
    compute_ms: float
    cold_ms: float  # first token, its KV read from the disk
    cold_load_ms: float  # of that, until the KV was in the pool, verified
    warm_ms: float  # first token, its KV in the system's memory
    warm_load_ms: float
    disk_ms: float  # reading as many bytes, and nothing else

    @property
    def sooner(self) -> float:
        return self.compute_ms / self.cold_ms

    @property
    def sooner_warm(self) -> float:
        return self.compute_ms / self.warm_ms

    @property
    def of_disk(self) -> float:
        return self.cold_load_ms / self.disk_ms


class FirstToken(NamedTuple):
    ms: float
    load_ms: float  # of that


async def first_token(worker: WorkerSession, tokens: list[int], restored_tokens: int) -> FirstToken:
    """Raises: RuntimeError where another number of tokens came from files."""
    command = session_pb2.Prefill(**make_command(tokens, 1))
    began = time.monotonic()
    heard = await worker.prefill(command)
    if heard.event.timings.restored_tokens != restored_tokens:
        raise RuntimeError(f"{heard.event.timings.restored_tokens} tokens came from files, not {restored_tokens}")
    return FirstToken((heard.at - began) * 1e3, heard.event.timings.restore_ms)


def segments(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.kv"))


def throw_out(paths: Sequence[Path]) -> None:
    """Of the system's memory, once they are on the disk."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def read_rate(paths: Sequence[Path]) -> float:
    """Bytes per second of all of them, from the disk."""
    throw_out(paths)
    piece, done, began = bytearray(READ_BYTES), 0, time.monotonic()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(piece):
                done += count
    return done / (time.monotonic() - began)


async def stored(directory: Path, size_bytes: int) -> None:
    """Until the worker has written so much. Raises: TimeoutError."""
    async with asyncio.timeout(STORED_S):
        while sum(path.stat().st_size for path in segments(directory)) < size_bytes:  # noqa: ASYNC110 -- no event
            await asyncio.sleep(0.05)


async def measure(model: Path, tokens: int, repeats: int, directory: Path) -> Point:
    blocks = tokens // BLOCK_TOKENS
    tier = ("--kv-tier-dir", directory, "--kv-tier-size", "16GiB")
    with worker_process("prefill", model, *FLAGS, *tier) as first:
        async with WorkerSession(first.endpoint) as worker:
            block_bytes = await warm_up(worker, directory)
            prompts = [new_prompt(worker, blocks * BLOCK_TOKENS + 1) for _ in range(repeats)]
            computed = [await first_token(worker, prompt, 0) for prompt in prompts]
            await stored(directory, (1 + repeats * blocks) * block_bytes)
        first.process.kill()
    rate = read_rate(segments(directory))
    cold, warm = list[FirstToken](), list[FirstToken]()
    for times, is_cold in ((cold, True), (warm, False)):
        with worker_process("prefill", model, *FLAGS, *tier) as next_one:
            async with WorkerSession(next_one.endpoint) as worker:
                await first_token(worker, new_prompt(worker, BLOCK_TOKENS + 1), 0)
                for prompt in prompts:
                    if is_cold:
                        throw_out(segments(directory))
                    times.append(await first_token(worker, prompt, blocks * BLOCK_TOKENS))
            next_one.process.kill()
    read_bytes = blocks * block_bytes
    medians = (*_medians(computed)[:1], *_medians(cold), *_medians(warm))
    return Point(tokens, read_bytes, *medians, disk_ms=read_bytes / rate * 1e3)


def _medians(times: Sequence[FirstToken]) -> FirstToken:
    return FirstToken(statistics.median(each.ms for each in times), statistics.median(each.load_ms for each in times))


async def warm_up(worker: WorkerSession, directory: Path) -> int:
    """Returns the bytes of a block."""
    await first_token(worker, new_prompt(worker, BLOCK_TOKENS + 1), 0)
    await stored(directory, 2 * HEADER_BYTES)
    header = read_segment_header(segments(directory)[0].read_bytes()[:HEADER_BYTES])
    if header is None:
        raise RuntimeError("the worker wrote a segment without a header")
    return header.block_bytes


COLUMNS: Columns[Point] = {
    "tokens": lambda point: point.tokens,
    "MB": lambda point: f"{point.bytes / 1e6:.0f}",
    "compute ms": lambda point: f"{point.compute_ms:.0f}",
    "cold ms": lambda point: f"{point.cold_ms:.0f}",
    "warm ms": lambda point: f"{point.warm_ms:.0f}",
    "cold load ms": lambda point: f"{point.cold_load_ms:.0f}",
    "warm load ms": lambda point: f"{point.warm_load_ms:.0f}",
    "disk ms": lambda point: f"{point.disk_ms:.0f}",
    "cold sooner": lambda point: f"{point.sooner:.1f} x",
    "warm sooner": lambda point: f"{point.sooner_warm:.1f} x",
    "cold load of disk": lambda point: f"{point.of_disk:.2f} x",
}


def main() -> None:
    options = read_arguments(__doc__, model=Path, tokens="2048,8128", repeats=3, directory=None)
    points = []
    for tokens in map(int, options.tokens.split(",")):
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            points.append(asyncio.run(measure(options.model, tokens, options.repeats, Path(directory))))
        print(table(points[-1:], COLUMNS), flush=True)
    print(table(points, COLUMNS))
    write_result(options.json, {"model": options.model.name, "points": [asdict(point) for point in points]})


if __name__ == "__main__":
    main()
