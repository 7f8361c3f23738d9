"""`baton bench gateway`: the cost of HTTP beside gRPC, from the same process, with workers that compute nothing.

CPU time for each streamed token with many streams, and the time to a first token; the ways take turns in every round.
"""

import asyncio
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.benchmarks.isolation.stack import OUR_CODE, Program, RunningProgram
from baton.benchmarks.report.machine import describe_machine
from baton.benchmarks.router.cost import UNENDING_TOKENS, StreamFigures, cpu_s, first_token_ms, measure_router
from baton.client import AsyncBatonClient, BatonClientError
from baton.launch.tiny_checkpoint import write_tiny_checkpoint
from baton.service.registry.redis_server import free_port

_TEXT = re.compile(rb'"(?:text|content)":"([^"]*)"')
_END = b"data: [DONE]\n\n"
READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Route:
    """A way to ask for a stream of so many tokens."""

    name: str
    path: str

    def body(self, tokens: int) -> bytes:
        asked: dict[str, object] = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        if self.path.endswith("/chat/completions"):
            asked["messages"] = [{"role": "user", "content": "hello there"}]
        else:
            asked["prompt"] = [3 + index for index in range(16)]
        return json.dumps(asked).encode()


COMPLETIONS = Route("completions", "/v1/completions")
CHAT = Route("chat", "/v1/chat/completions")


@dataclass(slots=True)
class _Counts:
    streams: int
    begun: int = 0
    chunks: int = 0
    tokens: int = 0
    all_begun: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, read: bytes, first: bool) -> None:
        texts = [text for text in _TEXT.findall(read) if text]
        self.chunks += len(texts)
        self.tokens += sum(map(len, texts))  # the workers' tokens are letters
        self.begun += first
        if self.begun == self.streams:
            self.all_begun.set()


class Connection:
    """One that is kept; a request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader = reader
        self._writer = writer
        self._host = host

    def ask(self, route: Route, tokens: int) -> None:
        body = route.body(tokens)
        head = f"POST {route.path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)

    async def read(self) -> bytes:
        """The bytes that have arrived; empty at the end of the connection."""
        return await self._reader.read(READ_BYTES)

    async def first_token_ms(self, route: Route) -> float:
        """Of a request for one token; its whole answer is read."""
        began_s = time.monotonic()
        self.ask(route, 1)
        read, took_s = b"", None
        while not read.endswith(b"0\r\n\r\n"):
            read += await self.read()
            if took_s is None and any(_TEXT.findall(read)):
                took_s = time.monotonic() - began_s
        if took_s is None or _END not in read:
            raise RuntimeError(f"no token came: {read[-300:]!r}")
        return took_s * 1e3


@asynccontextmanager
async def connection(target: str) -> AsyncIterator[Connection]:
    host, _, port = target.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=READ_BYTES)
    try:
        yield Connection(reader, writer, target)
    finally:
        writer.close()


async def measure_http(
    target: str, route: Route, pid: int, streams: int, interval_s: float, seconds: float
) -> StreamFigures:
    """As `router_streams.measure_router`, of one route."""
    counts = _Counts(streams)
    readers = [asyncio.create_task(_follow(target, route, counts)) for _ in range(streams)]
    try:
        async with asyncio.timeout(READY_S):
            await counts.all_begun.wait()
        await asyncio.sleep(0.2)  # the first steps of all of them are over
        began_s, cpu, chunks, tokens = time.monotonic(), cpu_s(pid), counts.chunks, counts.tokens
        await asyncio.sleep(seconds)
        spent, took_s = cpu_s(pid) - cpu, time.monotonic() - began_s
        offered = streams / interval_s
        return StreamFigures(streams, offered, took_s, counts.tokens - tokens, counts.chunks - chunks, spent)
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _follow(target: str, route: Route, counts: _Counts) -> None:
    async with connection(target) as stream:
        stream.ask(route, UNENDING_TOKENS)
        first = True
        while read := await stream.read():
            counts.take(read, first)
            first = False


READY_S = 30.0
GRPC = "grpc"
ROUTES = (COMPLETIONS, CHAT)
BATCH = 10  # first tokens in a row, before it is another way's turn


@dataclass(frozen=True, slots=True)
class GatewayBenchOptions:
    streams: int = 64
    interval_ms: float = 50.0  # of each stream's tokens
    seconds: float = 5.0  # of each window
    rounds: int = 5
    requests: int = 200  # of which the first token is timed, each way


@dataclass(frozen=True, slots=True)
class Way:
    """Medians of the rounds."""

    name: str
    cpu_us_per_token: float
    tokens_per_chunk: float
    first_token_ms: float


@dataclass(frozen=True, slots=True)
class Stack:
    target: str
    http_target: str
    pid: int


def run_gateway_bench(options: GatewayBenchOptions, as_json: bool) -> int:
    """Raises: CommandFailed."""
    ways = asyncio.run(measure_ways(options))
    print(json.dumps(as_json_object(ways), indent=2) if as_json else as_table(ways))
    return 0


async def measure_ways(options: GatewayBenchOptions) -> list[Way]:
    """gRPC first. Raises: CommandFailed."""
    streamed: dict[str, list[StreamFigures]] = {GRPC: [], **{route.name: [] for route in ROUTES}}
    firsts: dict[str, list[float]] = {name: [] for name in streamed}
    interval_s = options.interval_ms / 1e3
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as scratch:
        folder = Path(scratch)
        write_tiny_checkpoint(folder / "zero")
        async with gateway_and_workers(folder, options.interval_ms) as stack:
            await _first_tokens(stack, options.requests, firsts)
            for _ in range(options.rounds):
                counted = (stack.pid, options.streams, interval_s, options.seconds)
                streamed[GRPC].append(await measure_router(stack.target, *counted))
                for route in ROUTES:
                    streamed[route.name].append(await measure_http(stack.http_target, route, *counted))
    return [
        Way(
            name,
            statistics.median(each.cpu_us_per_token for each in figures),
            statistics.median(each.tokens_per_message for each in figures),
            statistics.median(firsts[name]),
        )
        for name, figures in streamed.items()
    ]


def as_json_object(ways: list[Way]) -> dict[str, Any]:
    grpc = ways[0]
    return {
        "machine": describe_machine(),
        "ways": {
            way.name: {
                "cpu_us_per_token": way.cpu_us_per_token,
                "tokens_per_chunk": way.tokens_per_chunk,
                "first_token_ms_p50": way.first_token_ms,
                "cpu_us_per_token_over_grpc": way.cpu_us_per_token - grpc.cpu_us_per_token,
                "first_token_ms_over_grpc": way.first_token_ms - grpc.first_token_ms,
            }
            for way in ways
        },
    }


def as_table(ways: list[Way]) -> str:
    grpc = ways[0]
    lines = ["way          CPU us/token  over gRPC  tokens/chunk  first token ms  over gRPC"]
    lines += [
        f"{way.name:12} {way.cpu_us_per_token:12.1f} {way.cpu_us_per_token - grpc.cpu_us_per_token:10.1f}"
        f" {way.tokens_per_chunk:13.2f} {way.first_token_ms:15.2f} {way.first_token_ms - grpc.first_token_ms:10.2f}"
        for way in ways
    ]
    return "\n".join(lines)


@asynccontextmanager
async def gateway_and_workers(folder: Path, interval_ms: float, *flags: object) -> AsyncIterator[Stack]:
    """A gateway, with flags if need be, on a core of its own where there are two, all else on the others."""
    port, admin, http, prefill, decode = (free_port() for _ in range(5))
    cores = sorted(os.sched_getaffinity(0))
    rest = tuple(cores[1:]) or (cores[0],)
    workers = _program(
        "workers", "baton.benchmarks.router.worker", rest, folder, folder / "zero", prefill, decode, interval_ms
    )
    members = f"prefill@127.0.0.1:{prefill},decode@127.0.0.1:{decode}"
    ports = ("--port", port, "--admin-port", admin, "--http-port", http)
    gateway = _program("gateway", "baton.gateway", (cores[0],), folder, *ports, "--workers", members, *flags)
    target = f"127.0.0.1:{port}"

    async def ready() -> bool:
        try:
            async with AsyncBatonClient(target, timeout_s=1.0) as baton:
                return bool(await baton.models())
        except BatonClientError:
            return False

    async with RunningProgram(workers), RunningProgram(gateway) as running:
        await running.wait_until(ready, READY_S)
        yield Stack(target, f"127.0.0.1:{http}", running.pid)


async def _first_tokens(stack: Stack, requests: int, firsts: dict[str, list[float]]) -> None:
    """One request at a time. The first of each batch warms up and is not counted."""
    async with AsyncExitStack() as undo:
        http = await undo.enter_async_context(connection(stack.http_target))

        async def batch(route: Route) -> float:
            took = [await http.first_token_ms(route) for _ in range(BATCH + 1)]
            return statistics.median(took[1:])

        for _ in range(max(1, requests // BATCH)):
            firsts[GRPC].append(await first_token_ms(stack.target, BATCH, 16))
            for route in ROUTES:
                firsts[route.name].append(await batch(route))


def _program(name: str, module: str, cores: tuple[int, ...], scratch: Path, *flags: object) -> Program:
    command = (sys.executable, "-P", "-m", module, *map(str, flags))
    return Program(name, command, cores, scratch / f"{name}.log", {**OUR_CODE, "OMP_NUM_THREADS": "1"})
