"""From how many blocks on fetching KV from another prefill worker is faster than computing it.

    python -m baton.lab.benchmarks.transfer.fetch_break_even [--model FOLDER] [--blocks 1,2,4,...] [--json FILE]

Three prefill workers, each a process of its own. For every size the first computes a new prompt of so many blocks and
one token; then the second gets the same prompt with the hint that the first has its blocks. Both say in PrefillTimings
what that took. The third gets it too and decides by itself: `auto` is how often it fetched. Once with the first one's
pool in shared memory, once with one that is read over TCP, once over gRPC. The source is idle: a busy one lets a
fetch wait until the step that it is in has ended.
"""

import asyncio
import os
import secrets
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.lab.benchmarks.report.result import DEMO, Columns, read_arguments, table, write_result
from baton.lab.benchmarks.transfer.worker_pair import (
    BLOCK_TOKENS,
    WorkerSession,
    make_command,
    new_prompt,
    worker_process,
)
from baton.protos import session_pb2

TRANSPORTS = ("shared_memory", "tcp", "grpc")
SHARED = ("--chunk-tokens", 512, "--kv-memory", "1GiB")


@dataclass(frozen=True)
class Point:
    """One size; medians in milliseconds."""

    transport: str
    blocks: int
    bytes: int
    compute_ms: float  # of the blocks alone: the whole prompt less a prompt of one token
    fetch_ms: float
    auto: float  # share of the prompts that a worker of default flags fetched


async def prefill(
    worker: WorkerSession, tokens: list[int], source: WorkerSession | None = None
) -> session_pb2.PrefillTimings:
    """Computes a prompt, perhaps with the blocks that `source` has, and lets it go."""
    command = session_pb2.Prefill(**make_command(tokens, 1))
    if source is not None:
        identity, blocks = secrets.token_bytes(16), len(command.block_hashes)
        command.fetch.CopyFrom(session_pb2.Fetch(endpoint=source.endpoint, transfer_id=identity, blocks=blocks))
    timings: session_pb2.PrefillTimings = (await worker.prefill(command)).event.timings
    return timings


@dataclass(frozen=True)
class Workers:
    source: WorkerSession
    reader: WorkerSession  # fetches always
    chooser: WorkerSession  # fetches where it believes that to be sooner

    def prompt(self, blocks: int) -> list[int]:
        """New, and one token longer than its blocks: a hit ends before the block of the last token."""
        return new_prompt(self.source, blocks * BLOCK_TOKENS + 1)

    async def compute(self, prompt: list[int]) -> float:
        """Milliseconds, on the source."""
        return sum((await prefill(self.source, prompt)).chunk_ms)


@asynccontextmanager
async def started(model: Path, transport: str) -> AsyncIterator[Workers]:
    """The source on the first core, the others on the last."""
    cores = sorted(os.sched_getaffinity(0))
    first, last = cores[0], cores[-1]
    flags: tuple[tuple[object, ...], ...] = (
        ("--cores", first, "--transfer-cores", last, "--transport", transport),
        ("--cores", last, "--transfer-cores", first, "--fetch", "always", "--fetch-timeout-s", "60"),
        ("--cores", last, "--transfer-cores", first),
    )
    async with AsyncExitStack() as undo:
        processes = [undo.enter_context(worker_process("prefill", model, *SHARED, *each, threads=1)) for each in flags]
        sessions = [await undo.enter_async_context(WorkerSession(each.endpoint)) for each in processes]
        yield Workers(*sessions)


async def measure(model: Path, transport: str, sizes: Sequence[int], repeats: int) -> list[Point]:
    async with started(model, transport) as workers:
        # Pairs, warms, and lets the chooser learn what it computes in a second.
        for blocks in (2, max(sizes), max(sizes)):
            prompt = workers.prompt(blocks)
            await workers.compute(prompt)
            await prefill(workers.reader, prompt, workers.source)
            await prefill(workers.chooser, prompt)
        least_ms = statistics.median([await workers.compute(workers.prompt(0)) for _ in range(repeats)])
        return [await measure_size(workers, transport, blocks, repeats, least_ms) for blocks in sizes]


async def measure_size(workers: Workers, transport: str, blocks: int, repeats: int, least_ms: float) -> Point:
    computed_ms, fetched, chosen = [], [], 0
    for _ in range(repeats):
        prompt = workers.prompt(blocks)
        computed_ms.append(await workers.compute(prompt) - least_ms)
        fetched.append(await prefill(workers.reader, prompt, workers.source))
        chosen += (await prefill(workers.chooser, prompt, workers.source)).fetched_tokens > 0
    if any(timings.fetched_tokens != blocks * BLOCK_TOKENS for timings in fetched):
        raise RuntimeError(f"not all of {blocks} blocks were fetched")
    fetch_ms = statistics.median(timings.fetch_ms for timings in fetched)
    return Point(transport, blocks, fetched[0].fetch_bytes, statistics.median(computed_ms), fetch_ms, chosen / repeats)


COLUMNS: Columns[Point] = {
    "transport": lambda point: point.transport,
    "blocks": lambda point: point.blocks,
    "tokens": lambda point: point.blocks * BLOCK_TOKENS,
    "MB": lambda point: f"{point.bytes / 1e6:.2f}",
    "compute ms": lambda point: f"{point.compute_ms:.2f}",
    "fetch ms": lambda point: f"{point.fetch_ms:.2f}",
    "auto": lambda point: f"{point.auto:.0%}",
}


def main() -> None:
    options = read_arguments(__doc__, model=DEMO, blocks="1,2,4,8,16,32,60", repeats=9)
    sizes = [int(blocks) for blocks in options.blocks.split(",")]
    points: list[Point] = []
    for transport in TRANSPORTS:
        points += asyncio.run(measure(options.model, transport, sizes, options.repeats))
    print(table(points, COLUMNS))
    for transport in TRANSPORTS:
        print(f"{transport}: {verdict([point for point in points if point.transport == transport])}")
    write_result(options.json, {"model": options.model.name, "points": [asdict(point) for point in points]})


def verdict(points: Sequence[Point]) -> str:
    """From where on fetching is sooner, for this size and every larger one that was measured."""
    winning = None
    for point in sorted(points, key=lambda point: -point.blocks):
        if point.fetch_ms >= point.compute_ms:
            break
        winning = point.blocks
    return "computing is sooner" if winning is None else f"fetching is sooner from {winning} blocks on"


if __name__ == "__main__":
    main()
