"""`baton bench router`: the cost of the router itself, with workers that compute nothing.

One decision; CPU time for each streamed token with many streams, beside that of gRPC alone for as many messages; how
much longer a token takes than from a bare server; the most tokens a second.
"""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc

from cli.bench.isolation_stack import OUR_CODE, Program, RunningProgram
from cli.bench.machine import describe_machine
from cli.bench.router_decision import DecisionFigures, measure_decision
from cli.bench.router_streams import (
    Delays,
    StreamFigures,
    first_token_ms,
    floor_delays,
    measure_floor,
    measure_router,
    router_delays,
)
from cli.tiny_checkpoint import write_tiny_checkpoint
from client import AsyncBatonClient, BatonClientError
from service.redis_server import free_port

READY_S = 30.0
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
        "workers", "cli.bench.router_worker", rest, folder, folder / "zero", prefill, decode, interval_ms
    )
    members = f"prefill@127.0.0.1:{prefill},decode@127.0.0.1:{decode}"
    flags = ("--port", port, "--admin-port", admin, "--workers", members, "--log-level", "warning")
    router = _program("router", "router", first, folder, *flags)
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
        _program("floor", "cli.bench.router_floor", _cores()[0], folder, port, interval_ms)
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
