"""Load test of a service: `baton bench serve`. Several targets get the same requests, one target after the other."""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from baton.lab.benchmarks.serve.load import (
    Job,
    LoadRun,
    Metrics,
    RandomJobs,
    ServiceLoad,
    Spread,
    measure,
    poisson_arrivals_s,
)
from baton.lab.benchmarks.serve.targets import Servers, opened
from baton.lab.report.result import Columns, table


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrival process: at a rate, or whenever one of `concurrency` requests is answered."""

    rate: float | None = None  # per second, may be infinite
    burstiness: float = 1.0
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Lengths:
    """Means, in tokens."""

    input_tokens: int = 1024
    output_tokens: int = 128
    prefix_tokens: int = 0
    range_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class ServeBenchOptions:
    servers: Servers
    arrivals: Arrivals
    lengths: Lengths
    requests: int = 100
    objectives_ms: dict[str, float] = field(default_factory=dict)  # of a good request, by OBJECTIVES
    seed: int = 0


def run_serve_bench(options: ServeBenchOptions, as_json: bool) -> int:
    """1 where requests failed. Raises: CommandFailed."""
    results = asyncio.run(measure_all(options))
    print(json.dumps([result.as_json() for result in results]) if as_json else "\n\n".join(map(as_table, results)))
    return 1 if any(result.failed for result in results) else 0


async def measure_all(options: ServeBenchOptions) -> list[Metrics]:
    """Measure all targets. Raises: CommandFailed."""
    results = []
    async with opened(options.servers) as servers:
        for server in servers:
            jobs = make_jobs(options, server.vocab_size)
            with tqdm(total=len(jobs), unit="request", file=sys.stderr, disable=not sys.stderr.isatty()) as progress:
                run = await _run(options.arrivals, ServiceLoad(server.target.answer, progress.update), jobs)
            results.append(measure(server.target.name, run, options.objectives_ms))
    return results


def make_jobs(options: ServeBenchOptions, vocab_size: int) -> list[Job]:
    """The same ones for every server of the same vocabulary."""
    arrivals, lengths, seed = options.arrivals, options.lengths, options.seed
    rate = float("inf") if arrivals.rate is None else arrivals.rate
    drawn = RandomJobs(
        lengths.input_tokens, lengths.output_tokens, lengths.prefix_tokens, lengths.range_ratio, vocab_size, seed
    )
    return drawn.draw(poisson_arrivals_s(options.requests, rate, arrivals.burstiness, seed))


COLUMNS: Columns[tuple[str, Spread]] = {
    "  ms": lambda row: f"  {row[0]}",
    "mean": lambda row: f"{row[1].mean:.2f}",
    "p50": lambda row: f"{row[1].p50:.2f}",
    "p90": lambda row: f"{row[1].p90:.2f}",
    "p99": lambda row: f"{row[1].p99:.2f}",
}


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
    lines.append(table(rows, COLUMNS))
    lines.append(f"  sent after their time: {metrics.late.p50:.2f} ms (p50), {metrics.late.p99:.2f} ms (p99)")
    return "\n".join(lines + [f"  failed: {error}" for error in metrics.errors])


async def _run(arrivals: Arrivals, load: ServiceLoad, jobs: Sequence[Job]) -> LoadRun:
    if arrivals.concurrency is not None:
        return await load.closed_loop(jobs, arrivals.concurrency)
    return await load.open_loop(jobs)
