"""Command `baton bench serve`: load test of one or more servers, which get the same requests one after the other."""

import asyncio
import json
import sys

from tqdm import tqdm

from baton.lab.benchmarks.serve.load import Job, Metrics, RandomJobs, ServiceLoad, Spread, measure, poisson_arrivals_s
from baton.lab.benchmarks.serve.targets import opened
from baton.lab.commands.bench_options import ServeBenchOptions
from baton.lab.report.result import Columns, make_result, table


def run_serve_bench(options: ServeBenchOptions) -> int:
    """Measure all targets and print the metrics; return 1 if a request failed. Raises: CommandFailed."""
    results = asyncio.run(measure_all(options))
    if options.json:
        print(json.dumps(make_result((), [{each.target: each.as_json() for each in results}], None)))
    else:
        print("\n\n".join(map(as_table, results)))
    return 1 if any(result.failed for result in results) else 0


async def measure_all(options: ServeBenchOptions) -> list[Metrics]:
    """Measure all targets. Raises: CommandFailed."""
    results, objectives_ms = [], options.objectives_ms
    async with opened(options) as servers:
        for server in servers:
            jobs = make_jobs(options, server.vocab_size)
            with tqdm(total=len(jobs), unit="request", file=sys.stderr, disable=not sys.stderr.isatty()) as progress:
                load = ServiceLoad(server.target.answer, progress.update)
                if options.concurrency is not None:
                    run = await load.closed_loop(jobs, options.concurrency)
                else:
                    run = await load.open_loop(jobs)
            results.append(measure(server.target.name, run, objectives_ms))
    return results


def make_jobs(options: ServeBenchOptions, vocab_size: int) -> list[Job]:
    """Draw the jobs of a server. Servers with the same vocabulary size get the same jobs."""
    rate = float("inf") if options.rate is None else options.rate
    drawn = RandomJobs(
        options.input_len, options.output_len, options.prefix_len, options.range_ratio, vocab_size, options.seed
    )
    return drawn.draw(poisson_arrivals_s(options.requests, rate, options.burstiness, options.seed))


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
    lines.append(f"  lag of this client in sending: {metrics.late.p50:.2f} ms (p50), {metrics.late.p99:.2f} ms (p99)")
    return "\n".join(lines + [f"  failed: {error}" for error in metrics.errors])
