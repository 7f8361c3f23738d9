"""Measures CPU time and delays of many streams through a router, or a bare server, with workers that compute nothing.

The client reads gRPC messages as bytes and HTTP from a raw socket, and runs on other cores, so it costs little itself.
"""

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from baton.lab.benchmarks.router.worker import FLOOR_METHOD, MARKS_METHOD, TIME_BYTES
from baton.lab.harness.processes import HOST, accepts, listens, our_program, running, serves, split_cores
from baton.lab.report.statistics import percentile
from baton.process.registry.redis_server import free_port, free_ports
from baton.protos import baton_pb2

GENERATE_METHOD = "/baton.v1.BatonService/Generate"
CHANNELS = 8
UNENDING_TOKENS = 100_000
READY_S, SETTLE_S = 30.0, 0.2
READ_BYTES = 1 << 16
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_TEXT = re.compile(rb'"(?:text|content)":"([^"]*)"')
_END = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class StreamStack:
    target: str
    pid: int  # id of the measured process
    decode: str = ""  # the decode worker's endpoint
    http_target: str = ""


@dataclass(frozen=True, slots=True)
class Window:
    """Load: concurrent streams, each with a token every `interval_s`, measured for `seconds`."""

    streams: int
    interval_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """Figures of a window. `cpu_s`: user and system time of all threads of the server."""

    streams: int
    offered_tokens_per_s: float
    seconds: float
    tokens: int
    messages: int
    cpu_s: float

    @property
    def cpu_us_per_token(self) -> float:
        return self.cpu_s / self.tokens * 1e6

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_message(self) -> float:
        return self.tokens / self.messages

    @property
    def cpu_share(self) -> float:
        """Return the CPU time as a fraction of one core's time."""
        return self.cpu_s / self.seconds


@dataclass(frozen=True, slots=True)
class Delays:
    """Delays from the generation of a token to its arrival, in milliseconds."""

    p50_ms: float
    p99_ms: float
    count: int


@dataclass(slots=True)
class StreamCounts:
    streams: int
    begun: int = 0  # streams that have received a token
    messages: int = 0
    tokens: int = 0
    all_begun: asyncio.Event = field(default_factory=asyncio.Event)
    heard: asyncio.Event = field(default_factory=asyncio.Event)  # set whenever a message arrives

    def take(self, tokens: int, messages: int, is_first: bool) -> None:
        self.messages += messages
        self.tokens += tokens
        self.begun += is_first
        if messages:
            self.heard.set()
        if self.begun == self.streams:
            self.all_begun.set()


def cpu_s(pid: int) -> float:
    """Return the user and system time of all threads of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


Follow = Callable[[int, StreamCounts], Awaitable[None]]
"""Function that reads the stream with this number until it is cancelled."""


async def count_streams(follow: Follow, pid: int, window: Window) -> StreamFigures:
    counts = StreamCounts(window.streams)
    readers = [asyncio.ensure_future(follow(index, counts)) for index in range(window.streams)]
    try:
        async with asyncio.timeout(READY_S):
            await counts.all_begun.wait()
        await asyncio.sleep(SETTLE_S)  # until the first steps of all streams are over
        began_s, cpu, messages, tokens = time.monotonic(), cpu_s(pid), counts.messages, counts.tokens
        counts.heard.clear()
        await asyncio.sleep(window.seconds)
        async with asyncio.timeout(READY_S):
            await counts.heard.wait()  # if the machine stalled for the whole window, wait for at least one message
        spent, took_s = cpu_s(pid) - cpu, time.monotonic() - began_s
        offered = window.streams / window.interval_s
        return StreamFigures(window.streams, offered, took_s, counts.tokens - tokens, counts.messages - messages, spent)
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def measure_router(stack: StreamStack, window: Window) -> StreamFigures:
    return await _measure_grpc(stack, window, GENERATE_METHOD, generate(UNENDING_TOKENS), tokens_of)


async def measure_floor(stack: StreamStack, window: Window) -> StreamFigures:
    return await _measure_grpc(stack, window, FLOOR_METHOD, str(UNENDING_TOKENS).encode(), lambda _: 1)


async def _measure_grpc(
    stack: StreamStack, window: Window, method: str, request: bytes, count: Callable[[bytes], int]
) -> StreamFigures:
    channels = [_channel(stack.target, number) for number in range(min(CHANNELS, window.streams))]

    async def follow(index: int, counts: StreamCounts) -> None:
        call, begun = _stream(channels[index % len(channels)], method, request), False
        while isinstance(message := await call.read(), bytes):
            if tokens := count(message):
                counts.take(tokens, 1, not begun)
                begun = True

    try:
        return await count_streams(follow, stack.pid, window)
    finally:
        for channel in channels:
            await channel.close()


def generate(tokens: int, prompt_tokens: int = 16) -> bytes:
    ids = baton_pb2.TokenIds(ids=[3 + index % 256 for index in range(prompt_tokens)])
    sampling = baton_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
    return baton_pb2.GenerateRequest(token_ids=ids, sampling=sampling).SerializeToString()


def tokens_of(message: bytes) -> int:
    return len(baton_pb2.GenerateResponse.FromString(message).delta.token_ids)


async def router_delays(stack: StreamStack, tokens: int) -> Delays:
    """Measure the delays of decode tokens of a single request."""
    arrivals: list[int] = []
    async with _channel(stack.target) as channel, _channel(stack.decode) as worker:
        call = _stream(channel, GENERATE_METHOD, generate(tokens))
        while isinstance(message := await call.read(), bytes):
            arrivals += [time.monotonic_ns()] * tokens_of(message)
        marks: Any = worker.unary_unary(MARKS_METHOD)
        made: list[int] = json.loads(await marks(b""))
    return _delays(made, arrivals[1:])


async def floor_delays(stack: StreamStack, messages: int) -> Delays:
    made, arrivals = [], []
    async with _channel(stack.target) as channel:
        call = _stream(channel, FLOOR_METHOD, str(messages).encode())
        while isinstance(message := await call.read(), bytes):
            arrivals.append(time.monotonic_ns())
            made.append(int.from_bytes(message[:TIME_BYTES], "little"))
    return _delays(made, arrivals)


async def first_token_ms(stack: StreamStack, requests: int, prompt_tokens: int = 16) -> float:
    """Return the median time to the only token of requests that are sent one after another."""
    took: list[float] = []
    async with _channel(stack.target) as channel:
        for _ in range(requests):
            began_s = time.monotonic()
            call = _stream(channel, GENERATE_METHOD, generate(1, prompt_tokens))
            while not (isinstance(message := await call.read(), bytes) and tokens_of(message)):
                pass
            took.append(time.monotonic() - began_s)
            while isinstance(await call.read(), bytes):
                pass
    return percentile(took, 50) * 1e3


def _delays(made: list[int], arrivals: list[int]) -> Delays:
    delays = [(arrived - at) / 1e6 for at, arrived in zip(made, arrivals, strict=True)]
    return Delays(percentile(delays, 50), percentile(delays, 99), len(delays))


def _stream(channel: grpc.aio.Channel, method: str, request: bytes) -> "grpc.aio.UnaryStreamCall[bytes, bytes]":
    ask: Any = channel.unary_stream(method)
    call: grpc.aio.UnaryStreamCall[bytes, bytes] = ask(request)
    return call


def _channel(target: str, number: int = 0) -> grpc.aio.Channel:
    """Return a channel. Channels with different numbers do not share a connection."""
    return grpc.aio.insecure_channel(target, options=(("baton.bench.channel", number),))


@dataclass(frozen=True, slots=True)
class Route:
    """HTTP endpoint of answers."""

    name: str
    path: str

    def body(self, tokens: int, stream: bool = True) -> bytes:
        asked: dict[str, object] = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": stream}
        if self.path.endswith("/chat/completions"):
            asked["messages"] = [{"role": "user", "content": "hello there"}]
        else:
            asked["prompt"] = [3 + index for index in range(16)]
        return json.dumps(asked).encode()


COMPLETIONS = Route("completions", "/v1/completions")
CHAT = Route("chat", "/v1/chat/completions")


class StreamConnection:
    """Persistent HTTP connection with one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader = reader
        self._writer = writer
        self._host = host

    def ask(self, route: Route, tokens: int, stream: bool = True) -> None:
        body = route.body(tokens, stream)
        head = f"POST {route.path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)

    async def read(self) -> bytes:
        """Return the bytes that have arrived; empty at the end of the connection."""
        return await self._reader.read(READ_BYTES)

    async def complete(self, route: Route, tokens: int) -> int:
        """Request an answer that is not streamed, read it, and return its number of tokens."""
        self.ask(route, tokens, stream=False)
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        answer = json.loads(await self._reader.readexactly(int(length.partition(b":")[2])))
        return int(answer["usage"]["completion_tokens"])

    async def first_token_ms(self, route: Route) -> float:
        """Measure the time to first token of a request for one token, and read its complete answer."""
        began_s = time.monotonic()
        self.ask(route, 1)
        read, took_s = b"", None
        while not read.endswith(b"0\r\n\r\n"):
            read += await self.read()
            if took_s is None and any(_TEXT.findall(read)):
                took_s = time.monotonic() - began_s
        if took_s is None or _END not in read:
            raise RuntimeError(f"the answer ended without a token: {read[-300:]!r}")
        return took_s * 1e3


@asynccontextmanager
async def connection(target: str) -> AsyncIterator[StreamConnection]:
    host, _, port = target.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=READ_BYTES)
    try:
        yield StreamConnection(reader, writer, target)
    finally:
        writer.close()


async def measure_http(stack: StreamStack, window: Window, route: Route) -> StreamFigures:
    """Measure streams over HTTP: each event with text is a message, and each letter of the text a token."""

    async def follow(_: int, counts: StreamCounts) -> None:
        async with connection(stack.http_target) as stream:
            stream.ask(route, UNENDING_TOKENS)
            is_first = True
            while read := await stream.read():
                texts = [text for text in _TEXT.findall(read) if text]
                counts.take(sum(map(len, texts)), len(texts), is_first)
                is_first = False

    return await count_streams(follow, stack.pid, window)


async def measure_complete(stack: StreamStack, window: Window, route: Route) -> StreamFigures:
    """Measure concurrent answers that are not streamed, each as long as the window, from request to last byte."""
    tokens = round(window.seconds / window.interval_s)
    async with AsyncExitStack() as open_connections:
        clients = [
            await open_connections.enter_async_context(connection(stack.http_target)) for _ in range(window.streams)
        ]
        await asyncio.gather(*(client.complete(route, 1) for client in clients))
        began_s, cpu = time.monotonic(), cpu_s(stack.pid)
        made = await asyncio.gather(*(client.complete(route, tokens) for client in clients))
        spent, took_s = cpu_s(stack.pid) - cpu, time.monotonic() - began_s
    return StreamFigures(window.streams, window.streams / window.interval_s, took_s, sum(made), len(clients), spent)


@asynccontextmanager
async def serving(folder: Path, interval_ms: float, *flags: object) -> AsyncIterator[StreamStack]:
    """Run a router on one core and its workers on the others; `folder` contains the checkpoint `tiny`."""
    port, admin, http, prefill, decode = free_ports(5)
    first, rest = split_cores()
    at = (folder / "tiny", prefill, decode, interval_ms)
    workers = our_program("workers", folder, "baton.lab.benchmarks.router.worker", *at, cores=rest)
    members = f"prefill@{HOST}:{prefill},decode@{HOST}:{decode}"
    ports = ("--port", port, "--admin-port", admin, "--workers", members, "--log-level", "warning")
    server = our_program("router", folder, "baton.router", *ports, "--http-port", http, *flags, cores=first)
    target = f"{HOST}:{port}"
    async with running((workers, server), lambda: serves(target)) as it:
        yield StreamStack(target, it.pid, f"{HOST}:{decode}", f"{HOST}:{http}")


FLOOR_IS_READY = {"floor": listens, "http-floor": accepts}


@asynccontextmanager
async def floor_server(folder: Path, interval_ms: float, kind: str = "floor") -> AsyncIterator[StreamStack]:
    """Run a bare server on the core that the router would have. `kind`: "floor" (gRPC) or "http-floor"."""
    port = free_port()
    target = f"{HOST}:{port}"

    asked, is_ready = ("baton.lab.benchmarks.router.worker", kind, port, interval_ms), FLOOR_IS_READY[kind]
    async with running([our_program(kind, folder, *asked, cores=split_cores()[0])], lambda: is_ready(target)) as it:
        yield StreamStack(target, it.pid, http_target=target)
