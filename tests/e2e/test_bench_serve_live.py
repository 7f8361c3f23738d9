"""`baton bench serve` against a real router: all requests are answered with the requested tokens."""

from baton.lab.benchmarks.serve.serve import measure_all
from baton.lab.commands.bench_options import ServeBenchOptions
from tests.e2e.stack import Stack


async def test_router_answers_an_open_loop(stack: Stack) -> None:
    options = ServeBenchOptions(
        target=[f"grpc://{stack.target}"], timeout=20.0, input_len=40, output_len=6, range_ratio=0.5, rate=40.0,
        requests=8,
    )  # fmt: skip
    (metrics,) = await measure_all(options)
    assert (metrics.completed, metrics.failed) == (8, 0), metrics.errors
    assert metrics.total_output_tokens >= 8 * 3
    assert metrics.ttft.p50 > 0
    assert metrics.tpot.p50 > 0
