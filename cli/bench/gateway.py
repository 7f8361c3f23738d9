"""`baton bench gateway`: the cost of HTTP beside gRPC, from the same process, with workers that compute nothing.

CPU time for each streamed token with many streams, and the time to a first token; the ways take turns in every round.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.bench.gateway_streams import CHAT, COMPLETIONS, Route, connection, measure_http
from cli.bench.isolation_stack import OUR_CODE, Program, RunningProgram
from cli.bench.machine import describe_machine
from cli.bench.router_streams import StreamFigures, first_token_ms, measure_router
from cli.tiny_checkpoint import write_tiny_checkpoint
from client import AsyncBatonClient, BatonClientError
from service.redis_server import free_port

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
        "workers", "cli.bench.router_worker", rest, folder, folder / "zero", prefill, decode, interval_ms
    )
    members = f"prefill@127.0.0.1:{prefill},decode@127.0.0.1:{decode}"
    ports = ("--port", port, "--admin-port", admin, "--http-port", http)
    gateway = _program("gateway", "gateway", (cores[0],), folder, *ports, "--workers", members, *flags)
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
