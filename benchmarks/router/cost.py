"""`baton bench router`: the cost of the router itself, with workers that compute nothing.

One decision; CPU time for each streamed token with many streams, beside that of gRPC alone for as many messages; how
much longer a token takes than from a bare server; the most tokens a second.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc

from baton.benchmarks.isolation.stack import OUR_CODE, Program, RunningProgram
from baton.benchmarks.report.machine import describe_machine
from baton.benchmarks.report.statistics import percentile
from baton.benchmarks.router.decision import DecisionFigures, measure_decision
from baton.benchmarks.router.floor import METHOD as FLOOR_METHOD
from baton.benchmarks.router.floor import TIME_BYTES
from baton.benchmarks.router.worker import MARKS_METHOD
from baton.client import AsyncBatonClient, BatonClientError
from baton.launch.tiny_checkpoint import write_tiny_checkpoint
from baton.protos import baton_pb2
from baton.service.registry.redis_server import free_port

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


DELAY_INTERVAL_MS = 5.0


@dataclass(frozen=True, slots=True)
class RouterBenchOptions:
    streams: int = 256
    interval_ms: float = 50.0  # of each stream's tokens
    flood_ms: float = 12.8  # and at 20 000 tokens a second, which is all that one core is to do
    seconds: float = 10.0  # of each window
    workers: int = 16  # of the decision
    prompt_tokens: int = 8192  # of the decision
    decisions: int = 2000
    delays: int = 1000  # tokens of which the delay is measured


@dataclass(frozen=True, slots=True)
class RouterReport:
    decision: DecisionFigures
    streaming: StreamFigures
    streaming_floor: StreamFigures
    flood: StreamFigures
    delay: Delays
    delay_floor: Delays
    first_token_ms: float

    @property
    def added_ms(self) -> float:
        return self.delay.p50_ms - self.delay_floor.p50_ms

    def as_json(self) -> dict[str, Any]:
        streams = {name: getattr(self, name) for name in ("streaming", "streaming_floor", "flood")}
        return {
            "machine": describe_machine(),
            "decision_us_p50": self.decision.decision_p50_us,
            "hashing_us_p50": self.decision.hashing_p50_us,
            "cpu_us_per_token": self.streaming.cpu_us_per_token,
            "grpc_floor_cpu_us_per_message": self.streaming_floor.cpu_us_per_token,
            "tokens_per_s_per_core": self.flood.tokens_per_s / max(self.flood.cpu_share, 1e-9),
            "added_latency_ms_p50": self.added_ms,
            "first_token_ms_p50": self.first_token_ms,
            "decision": asdict(self.decision),
            **{name: {**asdict(each), **_derived(each)} for name, each in streams.items()},
            "delay": asdict(self.delay),
            "delay_floor": asdict(self.delay_floor),
        }


def run_router_bench(options: RouterBenchOptions, as_json: bool) -> int:
    """Raises: CommandFailed."""
    report = asyncio.run(measure_all(options))
    print(json.dumps(report.as_json(), indent=2) if as_json else "\n".join(as_lines(report)))
    return 0


async def measure_all(options: RouterBenchOptions) -> RouterReport:
    """Raises: CommandFailed."""
    decision = measure_decision(options.workers, options.prompt_tokens, options.decisions)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as scratch:
        folder = Path(scratch)
        write_tiny_checkpoint(folder / "zero")
        async with router_and_workers(folder, DELAY_INTERVAL_MS) as stack:
            delay = await router_delays(stack.target, stack.decode, options.delays)
            first_ms = await first_token_ms(stack.target, requests=100, prompt_tokens=16)
        async with router_and_workers(folder, options.interval_ms) as stack:
            streaming = await measure_router(
                stack.target, stack.pid, options.streams, options.interval_ms / 1e3, options.seconds
            )
        async with router_and_workers(folder, options.flood_ms) as stack:
            flood = await measure_router(
                stack.target, stack.pid, options.streams, options.flood_ms / 1e3, options.seconds
            )
        async with floor_server(folder, DELAY_INTERVAL_MS) as stack:
            delay_floor = await floor_delays(stack.target, options.delays)
        async with floor_server(folder, options.interval_ms) as stack:
            streaming_floor = await measure_floor(
                stack.target, stack.pid, options.streams, options.interval_ms / 1e3, options.seconds
            )
    return RouterReport(decision, streaming, streaming_floor, flood, delay, delay_floor, first_ms)


@dataclass(frozen=True, slots=True)
class Stack:
    target: str
    pid: int  # of the process that is measured
    decode: str = ""  # the decode worker's endpoint


@asynccontextmanager
async def router_and_workers(folder: Path, interval_ms: float) -> AsyncIterator[Stack]:
    """A router on a core of its own where there are two, all else on the others."""
    port, admin, prefill, decode = (free_port() for _ in range(4))
    first, rest = _cores()
    workers = _program(
        "workers", "baton.benchmarks.router.worker", rest, folder, folder / "zero", prefill, decode, interval_ms
    )
    members = f"prefill@127.0.0.1:{prefill},decode@127.0.0.1:{decode}"
    flags = ("--port", port, "--admin-port", admin, "--workers", members, "--log-level", "warning")
    router = _program("router", "baton.router", first, folder, *flags)
    target = f"127.0.0.1:{port}"

    async def ready() -> bool:
        try:
            async with AsyncBatonClient(target, timeout_s=1.0) as baton:
                return bool(await baton.models())
        except BatonClientError:
            return False

    async with RunningProgram(workers), RunningProgram(router) as running:
        await running.wait_until(ready, READY_S)
        yield Stack(target, running.pid, f"127.0.0.1:{decode}")


@asynccontextmanager
async def floor_server(folder: Path, interval_ms: float) -> AsyncIterator[Stack]:
    """The bare server, where the router would be."""
    port = free_port()
    target = f"127.0.0.1:{port}"

    async def ready() -> bool:
        async with grpc.aio.insecure_channel(target) as channel:
            try:
                async with asyncio.timeout(1.0):
                    await channel.channel_ready()
            except TimeoutError:
                return False
        return True

    async with RunningProgram(
        _program("floor", "baton.benchmarks.router.floor", _cores()[0], folder, port, interval_ms)
    ) as it:
        await it.wait_until(ready, READY_S)
        yield Stack(target, it.pid)


def as_lines(report: RouterReport) -> list[str]:
    decision, streaming, flood, floor = report.decision, report.streaming, report.flood, report.streaming_floor
    return [
        f"decision      {decision.decision_p50_us:8.1f} us p50, {decision.decision_p99_us:.1f} us p99: "
        f"{decision.prompt_tokens} tokens, {decision.workers} workers",
        f"hashing       {decision.hashing_p50_us:8.1f} us p50, {decision.hashing_p99_us:.1f} us p99",
        f"CPU per token {streaming.cpu_us_per_token:8.1f} us: {streaming.streams} streams, "
        f"{streaming.tokens_per_s:,.0f} tokens/s, {streaming.tokens_per_message:.2f} tokens a message; "
        f"gRPC alone {floor.cpu_us_per_token:.1f} us a message",
        f"flooded       {flood.cpu_us_per_token:8.1f} us: {flood.tokens_per_s:,.0f} tokens/s "
        f"of {flood.offered_tokens_per_s:,.0f} on {flood.cpu_share:.2f} cores, "
        f"{flood.tokens_per_message:.2f} tokens a message",
        f"delay added   {report.added_ms:8.2f} ms p50: {report.delay.p50_ms:.2f} ms (p99 {report.delay.p99_ms:.2f}) "
        f"through the router, {report.delay_floor.p50_ms:.2f} ms from a bare server",
        f"first token   {report.first_token_ms:8.2f} ms p50, there and back",
    ]


def _derived(figures: StreamFigures) -> dict[str, float]:
    names = ("cpu_us_per_token", "tokens_per_s", "tokens_per_message", "cpu_share")
    return {name: getattr(figures, name) for name in names}


def _cores() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(of the measured processes, of all others)"""
    cores = sorted(os.sched_getaffinity(0))
    return (cores[0],), tuple(cores[1:]) or (cores[0],)


def _program(name: str, module: str, cores: tuple[int, ...], scratch: Path, *flags: object) -> Program:
    command = (sys.executable, "-P", "-m", module, *map(str, flags))
    return Program(name, command, cores, scratch / f"{name}.log", {**OUR_CODE, "OMP_NUM_THREADS": "1"})
