"""`baton bench gateway`, for a moment, with real processes."""

from baton.lab.benchmarks.router.cost import GRPC, CallWay, as_json_object, as_table, measure_ways
from baton.lab.commands.bench_options import GatewayBenchOptions


async def test_every_way_is_measured() -> None:
    options = GatewayBenchOptions(streams=4, interval_ms=5.0, seconds=0.3, rounds=1, requests=10)

    ways = await measure_ways(options)

    assert [way.name for way in ways] == [GRPC, "completions", "chat"]
    assert all(way.first_token_ms > 0 and way.tokens_per_chunk >= 1 for way in ways)


def test_http_cost_is_reported_relative_to_grpc() -> None:
    ways = [CallWay(GRPC, 100.0, 1.0, 2.0), CallWay("chat", 130.0, 1.0, 2.5)]

    chat = as_json_object(ways)["ways"]["chat"]

    assert (chat["cpu_us_per_token_over_grpc"], chat["first_token_ms_over_grpc"]) == (30.0, 0.5)
    assert "30.0" in as_table(ways)
