"""Streams of the HTTP gateway, read with as little as it takes: one connection each, bytes counted as they come."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from cli.bench.router_streams import READY_S, UNENDING_TOKENS, StreamFigures, cpu_s

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
