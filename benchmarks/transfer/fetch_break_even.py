"""From how many blocks on a prefill worker had better fetch KV from another worker than compute it.

    .venv/bin/python -m baton.benchmarks.transfer.fetch_break_even [--model FOLDER] [--blocks 1,2,4,...] [--json FILE]

Three prefill workers, each a process of its own. For every size the first computes a new prompt of so many blocks and
one token; then the second gets the same prompt with the hint that the first has its blocks. Both say in PrefillTimings
what that took. The third gets it too and decides by itself: `auto` is how often it fetched. Once with the first one's
pool in shared memory, once with a pool that can only be read as a gRPC stream. The source is idle: a busy one lets a
fetch wait until the step that it is in has ended.
"""

import argparse
import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc

from baton import IMPORT_PATH
from baton.benchmarks.report.machine import describe_machine
from baton.generation.block_hash import HashChain
from baton.launch.paths import ROOT
from baton.protos import sampling_pb2, session_pb2, session_pb2_grpc
from baton.service.registry.redis_server import free_port
from baton.service.serving.grpc_options import INTERNAL_CHANNEL_OPTIONS

BLOCK_TOKENS = 32
START_S, ANSWER_S = 120.0, 60.0
TIME_LEFT_MS = 60_000


@dataclass(frozen=True)
class Point:
    """One size; medians in milliseconds."""

    transport: str
    blocks: int
    bytes: int
    compute_ms: float  # of the blocks alone: the whole prompt less a prompt of one token
    fetch_ms: float
    auto: float  # share of the prompts that a worker of default flags fetched


class Worker:
    """One prefill worker, and our session with it."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._channel = grpc.aio.insecure_channel(endpoint, INTERNAL_CHANNEL_OPTIONS)
        self._sent = 0

    async def connect(self) -> session_pb2.WorkerInfo:
        await asyncio.wait_for(self._channel.channel_ready(), START_S)
        async with asyncio.timeout(START_S):
            while True:
                self._call = session_pb2_grpc.SessionServiceStub(self._channel).Connect()
                hello = session_pb2.Hello(router_id=secrets.token_bytes(16))
                try:
                    await self._call.write(session_pb2.ConnectRequest(hello=hello))
                    welcome: session_pb2.Welcome = (await self._call.read()).welcome
                    return welcome.worker
                except grpc.aio.AioRpcError:  # still loading
                    await asyncio.sleep(0.2)

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()

    async def prefill(self, tokens: Sequence[int], source: "Worker | None") -> session_pb2.PrefillTimings:
        """Computes a prompt, perhaps with the blocks that `source` has, and lets it go."""
        chain = HashChain(bytes(32), BLOCK_TOKENS)
        hashes = chain.first(len(tokens) // BLOCK_TOKENS, tokens)
        fetch = None
        if source is not None:
            identity = secrets.token_bytes(16)
            fetch = session_pb2.Fetch(endpoint=source.endpoint, transfer_id=identity, blocks=len(hashes))
        command = session_pb2.Prefill(
            attempt_id=self._sent + 1,
            transfer_id=secrets.token_bytes(16),
            token_ids=tokens,
            sampling=sampling_pb2.Sampling(max_tokens=1, n=1, top_p=1.0),
            block_hashes=hashes,
            time_left_ms=TIME_LEFT_MS,
            fetch=fetch,
        )
        await self._send(prefill=command)
        async with asyncio.timeout(ANSWER_S):
            while True:
                message: session_pb2.ConnectResponse = await self._call.read()
                match message.WhichOneof("event"):
                    case "first_step":
                        await self._send(cancel=session_pb2.Cancel(attempt_id=command.attempt_id))
                        return message.first_step.timings
                    case "failed":
                        raise RuntimeError(message.failed.message)

    async def _send(self, **command: Any) -> None:
        self._sent += 1
        await self._call.write(session_pb2.ConnectRequest(number=self._sent, **command))


@contextmanager
def process(name: str, model: Path, core: int, other_core: int, flags: Sequence[str]) -> Iterator[str]:
    """A prefill worker of that many flags, until left; its endpoint."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "baton.prefill_worker",
        "--worker-id",
        name,
        "--port",
        str(port),
        "--model",
        str(model),
    ]
    command += ["--cores", str(core), "--transfer-cores", str(other_core), "--block-size", str(BLOCK_TOKENS)]
    command += ["--chunk-tokens", "512", "--kv-memory", "1GiB", "--log-level", "warning", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(IMPORT_PATH)}
    worker = subprocess.Popen(command, env=environment, cwd=ROOT)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        worker.terminate()
        worker.wait(30)


@dataclass(frozen=True)
class Workers:
    source: Worker
    reader: Worker  # fetches always
    chooser: Worker  # fetches where it believes that to be sooner
    vocabulary: int

    def prompt(self, blocks: int) -> list[int]:
        """New, and one token longer than its blocks: a hit ends before the block of the last token."""
        return [secrets.randbelow(self.vocabulary - 3) + 3 for _ in range(blocks * BLOCK_TOKENS + 1)]

    async def compute(self, prompt: Sequence[int]) -> float:
        """Milliseconds, on the source."""
        return sum((await self.source.prefill(prompt, None)).chunk_ms)


@asynccontextmanager
async def started(model: Path, transport: str) -> AsyncIterator[Workers]:
    cores = sorted(os.sched_getaffinity(0))
    first, last = cores[0], cores[-1]
    with (
        process("source", model, first, last, ["--transport", transport]) as source_endpoint,
        process("reader", model, last, first, ["--fetch", "always", "--fetch-timeout-s", "60"]) as reader_endpoint,
        process("chooser", model, last, first, []) as chooser_endpoint,
    ):
        source, reader, chooser = Worker(source_endpoint), Worker(reader_endpoint), Worker(chooser_endpoint)
        infos = [await worker.connect() for worker in (source, reader, chooser)]
        try:
            yield Workers(source, reader, chooser, infos[0].model.vocab_size)
        finally:
            for worker in (source, reader, chooser):
                await worker.close()


async def measure(model: Path, transport: str, sizes: Sequence[int], repeats: int) -> list[Point]:
    async with started(model, transport) as workers:
        for blocks in (
            2,
            max(sizes),
            max(sizes),
        ):  # pairs, warms, and lets the chooser learn what it computes in a second
            prompt = workers.prompt(blocks)
            await workers.compute(prompt)
            await workers.reader.prefill(prompt, workers.source)
            await workers.chooser.prefill(prompt, None)
        least_ms = statistics.median([await workers.compute(workers.prompt(0)) for _ in range(repeats)])
        return [await measure_size(workers, transport, blocks, repeats, least_ms) for blocks in sizes]


async def measure_size(workers: Workers, transport: str, blocks: int, repeats: int, least_ms: float) -> Point:
    computed_ms, fetched, chosen = [], [], 0
    for _ in range(repeats):
        prompt = workers.prompt(blocks)
        computed_ms.append(await workers.compute(prompt) - least_ms)
        fetched.append(await workers.reader.prefill(prompt, workers.source))
        chosen += (await workers.chooser.prefill(prompt, workers.source)).fetched_tokens > 0
    if any(timings.fetched_tokens != blocks * BLOCK_TOKENS for timings in fetched):
        raise RuntimeError(f"not all of {blocks} blocks were fetched")
    fetch_ms = statistics.median(timings.fetch_ms for timings in fetched)
    return Point(transport, blocks, fetched[0].fetch_bytes, statistics.median(computed_ms), fetch_ms, chosen / repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tableqa")
    parser.add_argument("--blocks", default="1,2,4,8,16,32,60")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = [int(blocks) for blocks in options.blocks.split(",")]
    points: list[Point] = []
    for transport in ("shared_memory", "grpc"):
        points += asyncio.run(measure(options.model, transport, sizes, options.repeats))
    print("transport      blocks  tokens      MB  compute ms  fetch ms   auto")
    for point in points:
        tokens, megabytes = point.blocks * BLOCK_TOKENS, point.bytes / 1e6
        print(
            f"{point.transport:<14} {point.blocks:>6} {tokens:>7} {megabytes:>7.2f}"
            f" {point.compute_ms:>11.2f} {point.fetch_ms:>9.2f} {point.auto:>6.0%}"
        )
    for transport in ("shared_memory", "grpc"):
        print(f"{transport}: {verdict([point for point in points if point.transport == transport])}")
    if options.json:
        result = {"machine": describe_machine(), "model": options.model.name, "points": [asdict(p) for p in points]}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


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
