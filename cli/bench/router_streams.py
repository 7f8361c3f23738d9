"""Many streams at once through a router, or from the bare server beside it: messages, tokens, CPU time, delays."""

import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from cli.bench.router_floor import METHOD as FLOOR_METHOD
from cli.bench.router_floor import TIME_BYTES
from cli.bench.router_worker import MARKS_METHOD
from cli.bench.statistics import percentile
from protos import baton_pb2

GENERATE_METHOD = "/baton.v1.BatonService/Generate"
CHANNELS = 8
UNENDING_TOKENS = 100_000
READY_S = 30.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """Of one window in which all streams ran. CPU time is the server's, user and system, all threads."""

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
        """Of one core."""
        return self.cpu_s / self.seconds


@dataclass(frozen=True, slots=True)
class Delays:
    """From the making of a token to its arrival, milliseconds."""

    p50_ms: float
    p99_ms: float
    count: int


@dataclass(slots=True)
class _Counts:
    streams: int
    begun: int = 0  # streams that have had a token
    messages: int = 0
    tokens: int = 0
    all_begun: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, tokens: int, is_first: bool) -> None:
        self.messages += 1
        self.tokens += tokens
        self.begun += is_first
        if self.begun == self.streams:
            self.all_begun.set()


def cpu_s(pid: int) -> float:
    """User and system time of a process so far, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def generate(tokens: int, prompt_tokens: int = 16) -> bytes:
    ids = baton_pb2.TokenIds(ids=[3 + index % 256 for index in range(prompt_tokens)])
    sampling = baton_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
    return baton_pb2.GenerateRequest(token_ids=ids, sampling=sampling).SerializeToString()


def tokens_of(message: bytes) -> int:
    return len(baton_pb2.GenerateResponse.FromString(message).delta.token_ids)


def one_token(message: bytes) -> int:
    return 1


async def measure_router(target: str, pid: int, streams: int, interval_s: float, seconds: float) -> StreamFigures:
    request = generate(UNENDING_TOKENS)
    return await _measure(target, GENERATE_METHOD, request, tokens_of, pid, streams, interval_s, seconds)


async def measure_floor(target: str, pid: int, streams: int, interval_s: float, seconds: float) -> StreamFigures:
    request = str(UNENDING_TOKENS).encode()
    return await _measure(target, FLOOR_METHOD, request, one_token, pid, streams, interval_s, seconds)


async def _measure(
    target: str,
    method: str,
    request: bytes,
    count: Callable[[bytes], int],
    pid: int,
    streams: int,
    interval_s: float,
    seconds: float,
) -> StreamFigures:
    counts = _Counts(streams)
    channels = [_channel(target, number) for number in range(min(CHANNELS, streams))]
    readers = [
        asyncio.create_task(_read(_stream(channels[index % len(channels)], method, request), count, counts))
        for index in range(streams)
    ]
    try:
        async with asyncio.timeout(READY_S):
            await counts.all_begun.wait()
        await asyncio.sleep(0.2)  # the first steps of all of them are over
        began_s, cpu, messages, tokens = time.monotonic(), cpu_s(pid), counts.messages, counts.tokens
        await asyncio.sleep(seconds)
        spent, took_s = cpu_s(pid) - cpu, time.monotonic() - began_s
        offered = streams / interval_s
        figures = StreamFigures(streams, offered, took_s, counts.tokens - tokens, counts.messages - messages, spent)
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        for channel in channels:
            await channel.close()
    return figures


async def _read(call: "grpc.aio.UnaryStreamCall[bytes, bytes]", count: Callable[[bytes], int], counts: _Counts) -> None:
    begun = False
    while isinstance(message := await call.read(), bytes):
        tokens = count(message)
        if tokens:
            counts.take(tokens, not begun)
            begun = True


async def router_delays(target: str, decode_target: str, tokens: int) -> Delays:
    """Of the tokens of decode, of one request by itself."""
    arrivals: list[int] = []
    async with _channel(target) as channel, _channel(decode_target) as worker:
        call = _stream(channel, GENERATE_METHOD, generate(tokens))
        while isinstance(message := await call.read(), bytes):
            arrivals += [time.monotonic_ns()] * tokens_of(message)
        marks: Any = worker.unary_unary(MARKS_METHOD)
        made: list[int] = json.loads(await marks(b""))
    return _delays(made, arrivals[1:])


async def floor_delays(target: str, messages: int) -> Delays:
    made, arrivals = [], []
    async with _channel(target) as channel:
        call = _stream(channel, FLOOR_METHOD, str(messages).encode())
        while isinstance(message := await call.read(), bytes):
            arrivals.append(time.monotonic_ns())
            made.append(int.from_bytes(message[:TIME_BYTES], "little"))
    return _delays(made, arrivals)


async def first_token_ms(target: str, requests: int, prompt_tokens: int) -> float:
    """Median time of whole requests for one token, one after another."""
    took: list[float] = []
    async with _channel(target) as channel:
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
    """Each of another number has a connection of its own."""
    return grpc.aio.insecure_channel(target, options=(("baton.bench.channel", number),))
