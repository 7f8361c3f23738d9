"""Commands `baton bench router` and `baton bench gateway`: cost of the router, with workers that compute nothing.

`router` measures one placement decision; the CPU time per streamed token with many streams over gRPC, next to a bare
gRPC server that sends as many messages, and over HTTP, next to a bare event loop that writes as many chunks; that per
token of answers that are not streamed; the delay that the router adds to a token; and the maximum tokens per second.
`gateway` compares HTTP with gRPC on the same router: CPU time per streamed token and time to first token, in
alternating rounds.
"""

import asyncio
import json
import statistics
from dataclasses import asdict, dataclass

from baton.lab.benchmarks.router.decision import DecisionFigures, measure_decision
from baton.lab.benchmarks.router.streams import (
    CHAT,
    COMPLETIONS,
    Delays,
    Route,
    StreamFigures,
    StreamStack,
    Window,
    connection,
    first_token_ms,
    floor_delays,
    floor_server,
    measure_complete,
    measure_floor,
    measure_http,
    measure_router,
    router_delays,
    serving,
)
from baton.lab.commands.bench_options import GatewayBenchOptions, RouterBenchOptions
from baton.lab.harness.processes import tiny_model
from baton.lab.report.result import Columns, Result, make_result, table

DELAY_INTERVAL_MS = 5.0


@dataclass(frozen=True, slots=True)
class RouterReport:
    decision: DecisionFigures
    streaming: StreamFigures
    streaming_floor: StreamFigures
    http: StreamFigures
    http_floor: StreamFigures
    flood: StreamFigures
    complete: StreamFigures
    delay: Delays
    delay_floor: Delays
    first_token_ms: float

    @property
    def added_ms(self) -> float:
        return self.delay.p50_ms - self.delay_floor.p50_ms

    def as_json(self) -> Result:
        streams = {
            name: getattr(self, name)
            for name in ("streaming", "streaming_floor", "http", "http_floor", "flood", "complete")
        }
        figures = {
            "decision_us_p50": self.decision.decision_p50_us,
            "hashing_us_p50": self.decision.hashing_p50_us,
            "cpu_us_per_token": self.streaming.cpu_us_per_token,
            "cpu_us_per_token_over_http": self.http.cpu_us_per_token,
            "cpu_us_per_token_not_streamed": self.complete.cpu_us_per_token,
            "grpc_floor_cpu_us_per_message": self.streaming_floor.cpu_us_per_token,
            "http_floor_cpu_us_per_chunk": self.http_floor.cpu_us_per_token,
            "tokens_per_s_per_core": self.flood.tokens_per_s / max(self.flood.cpu_share, 1e-9),
            "added_latency_ms_p50": self.added_ms,
            "first_token_ms_p50": self.first_token_ms,
            "decision": asdict(self.decision),
            **{name: {**asdict(each), **_derived(each)} for name, each in streams.items()},
            "delay": asdict(self.delay),
            "delay_floor": asdict(self.delay_floor),
        }
        return make_result(["router", "process"], [figures], None)


def run_router_bench(options: RouterBenchOptions) -> int:
    """Measure the router and print it. Raises: CommandFailed."""
    report = asyncio.run(measure_all(options))
    print(json.dumps(report.as_json(), indent=2) if options.json else "\n".join(as_lines(report)))
    return 0


async def measure_all(options: RouterBenchOptions) -> RouterReport:
    """Measure the router. Raises: CommandFailed."""
    decision = measure_decision(options.workers, options.prompt_tokens, options.decisions)
    usual = Window(options.streams, options.interval_ms / 1e3, options.seconds)
    flooded = Window(options.streams, options.flood_ms / 1e3, options.seconds)
    with tiny_model() as folder:
        async with serving(folder, DELAY_INTERVAL_MS) as stack:
            delay = await router_delays(stack, options.delays)
            first_ms = await first_token_ms(stack, requests=100)
        async with serving(folder, options.interval_ms) as stack:
            streaming = await measure_router(stack, usual)
            http = await measure_http(stack, usual, COMPLETIONS)
            complete = await measure_complete(stack, usual, COMPLETIONS)
        async with serving(folder, options.flood_ms) as stack:
            flood = await measure_router(stack, flooded)
        async with floor_server(folder, DELAY_INTERVAL_MS) as stack:
            delay_floor = await floor_delays(stack, options.delays)
        async with floor_server(folder, options.interval_ms) as stack:
            streaming_floor = await measure_floor(stack, usual)
        async with floor_server(folder, options.interval_ms, "http-floor") as stack:
            http_floor = await measure_http(stack, usual, COMPLETIONS)
    return RouterReport(
        decision, streaming, streaming_floor, http, http_floor, flood, complete, delay, delay_floor, first_ms
    )


def as_lines(report: RouterReport) -> list[str]:
    decision, streaming, floor = report.decision, report.streaming, report.streaming_floor
    http, flood = report.http, report.flood
    return [
        f"decision      {decision.decision_p50_us:8.1f} us p50, {decision.decision_p99_us:.1f} us p99: "
        f"{decision.prompt_tokens} tokens, {decision.workers} workers",
        f"hashing       {decision.hashing_p50_us:8.1f} us p50, {decision.hashing_p99_us:.1f} us p99",
        f"CPU per token {streaming.cpu_us_per_token:8.1f} us: {streaming.streams} streams, "
        f"{streaming.tokens_per_s:,.0f} tokens/s, {streaming.tokens_per_message:.2f} tokens a message; "
        f"gRPC alone {floor.cpu_us_per_token:.1f} us a message",
        f"over HTTP     {http.cpu_us_per_token:8.1f} us: {http.tokens_per_s:,.0f} tokens/s, "
        f"{http.tokens_per_message:.2f} tokens a message; "
        f"bare writes {report.http_floor.cpu_us_per_token:.1f} us a chunk",
        f"not streamed  {report.complete.cpu_us_per_token:8.1f} us: {report.complete.streams} answers over HTTP, "
        f"{report.complete.tokens_per_s:,.0f} tokens/s, {report.complete.tokens_per_message:,.0f} tokens an answer",
        f"flooded       {flood.cpu_us_per_token:8.1f} us: {flood.tokens_per_s:,.0f} tokens/s "
        f"of {flood.offered_tokens_per_s:,.0f} on {flood.cpu_share:.2f} cores, "
        f"{flood.tokens_per_message:.2f} tokens a message",
        f"delay added   {report.added_ms:8.2f} ms p50: {report.delay.p50_ms:.2f} ms (p99 {report.delay.p99_ms:.2f}) "
        f"through the router, {report.delay_floor.p50_ms:.2f} ms from a bare server",
        f"first token   {report.first_token_ms:8.2f} ms p50, from request to token",
    ]


def _derived(figures: StreamFigures) -> dict[str, float]:
    names = ("cpu_us_per_token", "tokens_per_s", "tokens_per_message", "cpu_share")
    return {name: getattr(figures, name) for name in names}


GRPC = "grpc"
ROUTES = (COMPLETIONS, CHAT)
BATCH = 10  # requests of one API in a row, before the next API's turn


@dataclass(frozen=True, slots=True)
class CallWay:
    """Medians over the rounds for one API: gRPC, completions or chat."""

    name: str
    cpu_us_per_token: float
    tokens_per_chunk: float
    first_token_ms: float
    rounds_cpu_us: tuple[float, ...] = ()  # CPU time of a token in each round


def run_gateway_bench(options: GatewayBenchOptions) -> int:
    """Measure HTTP next to gRPC and print it. Raises: CommandFailed."""
    ways = asyncio.run(measure_ways(options))
    print(json.dumps(as_json_object(ways), indent=2) if options.json else as_table(ways))
    return 0


async def measure_ways(options: GatewayBenchOptions) -> list[CallWay]:
    """Measure gRPC and each HTTP route, gRPC first. Raises: CommandFailed."""
    streamed: dict[str, list[StreamFigures]] = {GRPC: [], **{route.name: [] for route in ROUTES}}
    firsts: dict[str, list[float]] = {name: [] for name in streamed}
    window = Window(options.streams, options.interval_ms / 1e3, options.seconds)
    with tiny_model() as folder:
        async with serving(folder, options.interval_ms) as stack:
            await _first_tokens(stack, options.requests, firsts)
            for _ in range(options.rounds):
                streamed[GRPC].append(await measure_router(stack, window))
                for route in ROUTES:
                    streamed[route.name].append(await measure_http(stack, window, route))
    return [
        CallWay(
            name,
            statistics.median(each.cpu_us_per_token for each in figures),
            statistics.median(each.tokens_per_message for each in figures),
            statistics.median(firsts[name]),
            tuple(each.cpu_us_per_token for each in figures),
        )
        for name, figures in streamed.items()
    ]


async def _first_tokens(stack: StreamStack, requests: int, firsts: dict[str, list[float]]) -> None:
    """Measure times to first token, one request at a time; the first of each batch is a warm-up and not counted."""
    async with connection(stack.http_target) as http:

        async def batch(route: Route) -> float:
            took = [await http.first_token_ms(route) for _ in range(BATCH + 1)]
            return statistics.median(took[1:])

        for _ in range(max(1, requests // BATCH)):
            firsts[GRPC].append(await first_token_ms(stack, BATCH))
            for route in ROUTES:
                firsts[route.name].append(await batch(route))


def as_json_object(ways: list[CallWay]) -> Result:
    grpc = ways[0]
    medians = {
        way.name: {
            "cpu_us_per_token": way.cpu_us_per_token,
            "tokens_per_chunk": way.tokens_per_chunk,
            "first_token_ms_p50": way.first_token_ms,
            "cpu_us_per_token_over_grpc": way.cpu_us_per_token - grpc.cpu_us_per_token,
            "first_token_ms_over_grpc": way.first_token_ms - grpc.first_token_ms,
        }
        for way in ways
    }
    rounds = [
        {way.name: {"cpu_us_per_token": way.rounds_cpu_us[number]} for way in ways}
        for number in range(len(grpc.rounds_cpu_us))
    ]
    return make_result(["router", "process"], rounds, None, ways=medians)


def as_table(ways: list[CallWay]) -> str:
    grpc = ways[0]
    columns: Columns[CallWay] = {
        "way": lambda way: way.name,
        "CPU us/token": lambda way: f"{way.cpu_us_per_token:.1f}",
        "us over gRPC": lambda way: f"{way.cpu_us_per_token - grpc.cpu_us_per_token:.1f}",
        "tokens/chunk": lambda way: f"{way.tokens_per_chunk:.2f}",
        "first token ms": lambda way: f"{way.first_token_ms:.2f}",
        "ms over gRPC": lambda way: f"{way.first_token_ms - grpc.first_token_ms:.2f}",
    }
    return table(ways, columns)
