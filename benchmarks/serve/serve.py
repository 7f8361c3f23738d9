"""`baton bench serve`: a service under load, and with --table at fixed numbers of streams.

Prefill: all prompts at once, new ones, with one token of answer each; prompt tokens over the time until the last of
them came. Decode: the same prompts once more, which a prefix cache may know; tokens over the time in which every stream
was being answered, from the last one's first token to the first one's last.

Several targets get the same requests, one target after the other.
"""

import asyncio
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tqdm import tqdm

from baton.benchmarks.serve.load import (
    Job,
    Load,
    Metrics,
    Outcome,
    RandomJobs,
    Run,
    Spread,
    Target,
    measure,
    poisson_arrivals_s,
    random_tokens,
)
from baton.benchmarks.serve.targets import Servers, opened
from baton.benchmarks.serve.trace import TraceJobs, read_trace
from baton.launch.errors import CommandFailed


@dataclass(frozen=True, slots=True)
class TableOptions:
    servers: Servers
    streams: tuple[int, ...] = (1, 16)
    input_tokens: int = 512
    output_tokens: int = 128
    rounds: int = 3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class StreamSpeed:
    """Medians of the rounds; tokens per second of all streams together."""

    target: str
    streams: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


def run_streams_bench(options: TableOptions, as_json: bool) -> int:
    """Raises: CommandFailed."""
    speeds = asyncio.run(measure_streams(options))
    print(json.dumps([asdict(speed) for speed in speeds]) if as_json else streams_table(speeds))
    return 0


async def measure_streams(options: TableOptions) -> list[StreamSpeed]:
    """Servers take turns in every round: other load on the machine meets all of them. Raises: CommandFailed."""
    speeds: list[StreamSpeed] = []
    async with opened(options.servers) as servers:
        for streams in options.streams:
            rounds: list[list[StreamSpeed]] = [[] for _ in servers]
            for number in range(options.rounds):
                for server, found in zip(servers, rounds, strict=True):
                    chance = random.Random(f"{options.seed}/{streams}/{number}")
                    prompts = [random_tokens(chance, options.input_tokens, server.vocab_size) for _ in range(streams)]
                    found.append(await _round(server.target, prompts, options.output_tokens))
            speeds += [_median(found) for found in rounds]
    return speeds


def streams_table(speeds: Sequence[StreamSpeed]) -> str:
    width = max(len(speed.target) for speed in speeds)
    lines = [f"{'target':{width}}  streams  prefill tokens/s  decode tokens/s"]
    lines += [
        f"{speed.target:{width}}  {speed.streams:7}  {speed.prefill_tokens_per_s:16,.0f}"
        f"  {speed.decode_tokens_per_s:15,.1f}"
        for speed in speeds
    ]
    return "\n".join(lines)


def decode_tokens_per_s(outcomes: Sequence[Outcome]) -> float:
    """Of all streams while all of them ran. Pieces stand for as many tokens as their stream had for each of them.

    Raises: CommandFailed where that was never so: the first had ended before the last began.
    """
    begin = max(outcome.pieces_s[0] for outcome in outcomes)
    end = min(outcome.pieces_s[-1] for outcome in outcomes)
    if end <= begin:
        raise CommandFailed("the first answer ended before the last one began: --output-len must be larger")
    tokens = 0.0
    for outcome in outcomes:
        made = sum(begin < piece_s <= end for piece_s in outcome.pieces_s)
        tokens += made * outcome.output_tokens / len(outcome.pieces_s)
    return tokens / (end - begin)


async def _round(target: Target, prompts: Sequence[tuple[int, ...]], output_tokens: int) -> StreamSpeed:
    first = await _at_once(target, prompts, 1)
    longer = await _at_once(target, prompts, output_tokens)
    prompt_tokens = sum(map(len, prompts))
    prefill_s = max(outcome.pieces_s[0] for outcome in first.outcomes)
    return StreamSpeed(target.name, len(prompts), prompt_tokens / prefill_s, decode_tokens_per_s(longer.outcomes))


async def _at_once(target: Target, prompts: Sequence[tuple[int, ...]], output_tokens: int) -> Run:
    run = await Load(target, lambda: None).open_loop([Job(prompt, output_tokens) for prompt in prompts])
    for outcome in run.outcomes:
        if outcome.error:
            raise CommandFailed(f"{target.name}: {outcome.error}")
    return run


def _median(rounds: Sequence[StreamSpeed]) -> StreamSpeed:
    return StreamSpeed(
        rounds[0].target,
        rounds[0].streams,
        statistics.median(speed.prefill_tokens_per_s for speed in rounds),
        statistics.median(speed.decode_tokens_per_s for speed in rounds),
    )


RANDOM_REQUESTS = 100


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests are sent: at a rate, as a trace has them, or whenever one of `concurrency` is answered."""

    rate: float | None = None  # per second, may be infinite
    burstiness: float = 1.0
    trace: Path | None = None
    speed: float = 1.0  # of the trace
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Lengths:
    """In tokens. Of random requests the mean; of a trace's the most, where given."""

    input_tokens: int | None
    output_tokens: int | None
    prefix_tokens: int = 0
    range_ratio: float = 0.0


DEFAULT_INPUT_TOKENS, DEFAULT_OUTPUT_TOKENS = 1024, 128


@dataclass(frozen=True, slots=True)
class ServeBenchOptions:
    servers: Servers
    arrivals: Arrivals
    lengths: Lengths
    requests: int | None = None  # None: 100 random ones, or the whole trace
    objectives_ms: dict[str, float] = field(default_factory=dict)  # of a good request, by OBJECTIVES
    seed: int = 0


def run_serve_bench(options: ServeBenchOptions, as_json: bool) -> int:
    """1 where requests failed. Raises: CommandFailed."""
    results = asyncio.run(measure_all(options))
    print(json.dumps([result.as_json() for result in results]) if as_json else "\n\n".join(map(as_table, results)))
    return 1 if any(result.failed for result in results) else 0


async def measure_all(options: ServeBenchOptions) -> list[Metrics]:
    """Raises: CommandFailed."""
    results = []
    async with opened(options.servers) as servers:
        for server in servers:
            jobs = make_jobs(options, server.vocab_size)
            with tqdm(total=len(jobs), unit="request", file=sys.stderr, disable=not sys.stderr.isatty()) as progress:
                run = await _run(options.arrivals, Load(server.target, progress.update), jobs)
            results.append(measure(server.target.name, run, options.objectives_ms))
    return results


def make_jobs(options: ServeBenchOptions, vocab_size: int) -> list[Job]:
    """The same ones for every server of the same vocabulary. Raises: CommandFailed."""
    arrivals, lengths, seed = options.arrivals, options.lengths, options.seed
    if arrivals.trace is not None:
        trace = TraceJobs(arrivals.speed, lengths.input_tokens, lengths.output_tokens, vocab_size, seed)
        return trace.make(read_trace(arrivals.trace, options.requests))
    rate = float("inf") if arrivals.rate is None else arrivals.rate
    requests = options.requests or RANDOM_REQUESTS
    drawn = RandomJobs(
        input_tokens=lengths.input_tokens or DEFAULT_INPUT_TOKENS,
        output_tokens=lengths.output_tokens or DEFAULT_OUTPUT_TOKENS,
        prefix_tokens=lengths.prefix_tokens,
        range_ratio=lengths.range_ratio,
        vocab_size=vocab_size,
        seed=seed,
    )
    return drawn.draw(poisson_arrivals_s(requests, rate, arrivals.burstiness, seed))


def as_table(metrics: Metrics) -> str:
    rows = (("TTFT", metrics.ttft), ("TPOT", metrics.tpot), ("ITL", metrics.itl), ("E2E", metrics.e2el))
    lines = [
        f"{metrics.target}: {metrics.completed} requests in {metrics.duration:.2f} s, {metrics.failed} failed",
        f"  {metrics.total_input_tokens} input tokens, {metrics.total_output_tokens} output tokens",
        f"  throughput: {metrics.request_throughput:.2f} requests/s, {metrics.output_throughput:.1f} output tokens/s, "
        f"{metrics.total_token_throughput:.1f} tokens/s in all",
    ]
    if metrics.request_goodput is not None:
        lines.append(f"  goodput: {metrics.request_goodput:.2f} requests/s")
    lines.append("  ms         mean       p50       p90       p99")
    lines += [f"  {name:4} {_in_columns(spread)}" for name, spread in rows]
    lines.append(f"  sent after their time: {metrics.late.p50:.2f} ms (p50), {metrics.late.p99:.2f} ms (p99)")
    return "\n".join(lines + [f"  failed: {error}" for error in metrics.errors])


def _in_columns(spread: Spread) -> str:
    return " ".join(f"{ms:9.2f}" for ms in (spread.mean, spread.p50, spread.p90, spread.p99))


async def _run(arrivals: Arrivals, load: Load, jobs: Sequence[Job]) -> Run:
    if arrivals.concurrency is not None:
        return await load.closed_loop(jobs, arrivals.concurrency)
    return await load.open_loop(jobs)
