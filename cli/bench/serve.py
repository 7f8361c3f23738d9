"""`baton bench serve`: a service under load, Baton's or any with OpenAI's completions, measured from the client's side.

Several targets get the same requests, one target after the other.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from cli.bench.serve_jobs import Job, RandomJobs, poisson_arrivals_s
from cli.bench.serve_load import Load, Run
from cli.bench.serve_metrics import Metrics, Spread, measure
from cli.bench.serve_servers import Servers, opened
from cli.bench.serve_trace import TraceJobs, read_trace

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
