"""`baton bench serve` against a real router: everything it asked for comes back."""

from baton.lab.benchmarks.serve.serve import Arrivals, Lengths, ServeBenchOptions, measure_all
from baton.lab.benchmarks.serve.targets import Servers
from tests.e2e.stack import Stack


async def test_a_router_answers_an_open_loop(stack: Stack) -> None:
    servers = Servers((f"grpc://{stack.target}",), (), None, None, "", timeout_s=20.0)
    lengths = Lengths(input_tokens=40, output_tokens=6, range_ratio=0.5)
    (metrics,) = await measure_all(ServeBenchOptions(servers, Arrivals(rate=40.0), lengths, requests=8))
    assert (metrics.completed, metrics.failed) == (8, 0), metrics.errors
    assert metrics.total_output_tokens >= 8 * 3
    assert metrics.ttft.p50 > 0
    assert metrics.tpot.p50 > 0
