"""`baton bench router`: each of its measurements with real processes, for a moment."""

from baton.lab.benchmarks.router.cost import RouterReport, as_lines
from baton.lab.benchmarks.router.decision import measure_decision
from baton.lab.benchmarks.router.streams import (
    COMPLETIONS,
    Window,
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
from baton.lab.harness.processes import tiny_model

INTERVAL_MS, STREAMS, SECONDS, TOKENS = 10.0, 4, 0.5, 10


def test_decision_is_measured_with_hashing_apart() -> None:
    figures = measure_decision(workers=4, prompt_tokens=256, rounds=5)
    assert 0 < figures.decision_p50_us <= figures.decision_p99_us
    assert figures.hashing_p50_us > 0 and figures.charge_p50_us > 0


async def test_streams_and_delays_are_measured_relative_to_a_bare_server() -> None:
    window = Window(STREAMS, INTERVAL_MS / 1e3, SECONDS)
    with tiny_model() as folder:
        async with (
            serving(folder, INTERVAL_MS) as stack,
            floor_server(folder, INTERVAL_MS) as floor,
            floor_server(folder, INTERVAL_MS, "http-floor") as http_floor,
        ):
            report = RouterReport(
                decision=measure_decision(workers=2, prompt_tokens=64, rounds=2),
                delay=await router_delays(stack, TOKENS),
                first_token_ms=await first_token_ms(stack, requests=2),
                streaming=await measure_router(stack, window),
                http=await measure_http(stack, window, COMPLETIONS),
                http_floor=await measure_http(http_floor, window, COMPLETIONS),
                flood=await measure_router(stack, window),
                complete=await measure_complete(stack, window, COMPLETIONS),
                delay_floor=await floor_delays(floor, TOKENS),
                streaming_floor=await measure_floor(floor, window),
            )
    for figures in (report.streaming, report.http, report.http_floor, report.flood, report.streaming_floor):
        assert figures.tokens >= figures.messages > 0
    assert report.delay.count == TOKENS - 1 and report.delay.p50_ms > 0  # prefill makes the first one
    assert report.delay_floor.count == TOKENS and report.first_token_ms > 0
    (result,) = report.as_json()["rounds"]
    assert {"decision_us_p50", "hashing_us_p50", "cpu_us_per_token", "added_latency_ms_p50"} <= result.keys()
    assert any("CPU per token" in line for line in as_lines(report))
