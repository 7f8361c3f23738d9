"""`baton bench router`: a short run with real processes says all that it is asked for."""

from cli.bench.router import RouterBenchOptions, as_lines, measure_all
from cli.bench.router_decision import measure_decision


def test_a_decision_is_measured_with_hashing_apart() -> None:
    figures = measure_decision(workers=4, prompt_tokens=256, rounds=5)
    assert 0 < figures.decision_p50_us <= figures.decision_p99_us
    assert 0 < figures.hashing_p50_us and 0 < figures.charge_p50_us


async def test_a_short_run_measures_everything() -> None:
    short = RouterBenchOptions(
        streams=4, interval_ms=20, flood_ms=10, seconds=0.3, workers=4, prompt_tokens=256, decisions=5, delays=10
    )
    report = await measure_all(short)
    result = report.as_json()
    for name in ("decision_us_p50", "cpu_us_per_token", "grpc_floor_cpu_us_per_message", "tokens_per_s_per_core"):
        assert result[name] >= 0, name
    assert report.streaming.tokens > 0 and report.streaming.tokens_per_message >= 1.0
    assert report.delay.count == 9 and report.delay.p50_ms > 0  # all tokens but the first, which prefill makes
    assert any("CPU per token" in line for line in as_lines(report))
