"""Stalls by cause in the metrics."""

from prometheus_client import CollectorRegistry

from baton.router.http.metrics import StallMetrics
from baton.text.causes import StallCause
from tests.fixtures.stalled import WAITED, blamed, stalled
from tests.router.http.conftest import Gateway


def values(metrics: StallMetrics) -> dict[tuple[str, str], float]:
    """By name and cause, without zeros."""
    registry = CollectorRegistry()
    registry.register(metrics)
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {(each.name, each.labels.get("cause", "")): each.value for each in samples if each.value}


def test_a_stall_counts_for_its_longest_cause_and_its_time_for_each() -> None:
    metrics = StallMetrics(lambda: 1.5)
    metrics.observe(stalled("a", (blamed("b", 80.0), WAITED), (blamed("c", 40.0),)))
    metrics.observe(stalled("d", (WAITED,)))

    assert values(metrics) == {
        ("baton:stalls_total", "prompt_tokens"): 2.0,
        ("baton:stalls_total", "cpu_wait"): 1.0,
        ("baton:stall_seconds_total", "prompt_tokens"): 0.12,
        ("baton:stall_seconds_total", "cpu_wait"): 0.02,
        ("baton:event_loop_busy_seconds_total", ""): 1.5,
    }


def test_a_stall_without_a_cause_counts_as_unknown() -> None:
    metrics = StallMetrics(lambda: 0.0)
    metrics.observe(stalled("a", ()))
    assert values(metrics) == {("baton:stalls_total", "unknown"): 1.0}


async def test_every_cause_is_there_from_the_start(gateway: Gateway) -> None:
    text = (await gateway.client.get("/metrics")).text
    for cause in StallCause:
        assert f'baton:stalls_total{{cause="{cause.value}"}} 0.0' in text
        assert f'baton:stall_seconds_total{{cause="{cause.value}"}} 0.0' in text
    assert "baton:event_loop_busy_seconds_total " in text


async def test_requests_of_a_router_are_counted(gateway: Gateway) -> None:
    for observe in gateway.process.tracer.late_observers:
        observe(stalled("a", (blamed("b"),)))
    assert 'baton:stalls_total{cause="prompt_tokens"} 1.0' in (await gateway.client.get("/metrics")).text
