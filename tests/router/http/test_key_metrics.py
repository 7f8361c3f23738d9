"""Metrics by API key: names as labels, never keys, and never more names than have room."""

from collections import Counter
from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest

from baton.process.security.api_keys import KeyLimits
from baton.router.http.key_metrics import MAX_NAMES, OTHERS, KeyMetrics
from baton.router.trace.record import ANSWERED, RequestEnd, RequestOutcome, RequestRecord, Timeline
from baton.router.types.request import Operation

LIMITED = RequestEnd(RequestOutcome.REFUSED, "tokens_per_minute", "RESOURCE_EXHAUSTED")


def ended(tenant: str, end: RequestEnd = ANSWERED, ttft_s: float | None = None) -> RequestRecord:
    timeline = Timeline(0.0, first_token_s=ttft_s)
    record = replace(RequestRecord.begin(Operation.GENERATE, None), tenant=tenant, timeline=timeline)
    record.end, record.delivered_tokens = end, 7
    return record


def text_of(metrics: KeyMetrics) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    return generate_latest(registry).decode()


def test_requests_tokens_limits_and_latency_are_counted_by_the_name_of_the_key() -> None:
    metrics = KeyMetrics(lambda: {"alice": KeyLimits(tokens_per_minute=60)}, lambda: Counter(alice=2))
    metrics.observe(ended("alice", ttft_s=0.2))
    metrics.observe(ended("alice", LIMITED))
    text = text_of(metrics)
    assert 'baton:key_requests_ended_total{key="alice",outcome="answered"} 1.0' in text
    assert 'baton:key_requests_limited_total{key="alice",limit="tokens_per_minute"} 1.0' in text
    assert 'baton:key_generation_tokens_total{key="alice"} 14.0' in text
    assert 'baton:key_active_requests{key="alice"} 2.0' in text
    assert 'baton:key_time_to_first_token_seconds_bucket{key="alice",le="0.25"} 1.0' in text
    assert 'baton:key_limit{key="alice",limit="tokens_per_minute"} 60.0' in text


def test_a_key_that_was_never_used_is_zero() -> None:
    text = text_of(KeyMetrics(lambda: {"bob": KeyLimits()}, Counter[str]))
    assert 'baton:key_requests_ended_total{key="bob",outcome="failed"} 0.0' in text


def test_names_beyond_the_bound_share_one_label() -> None:
    metrics = KeyMetrics(dict, lambda: Counter({f"k{number}": 1 for number in range(MAX_NAMES + 5)}))
    for number in range(MAX_NAMES + 5):
        metrics.observe(ended(f"k{number}"))
    text = text_of(metrics)
    assert text.count('outcome="answered"') == MAX_NAMES + 1
    assert f'baton:key_requests_ended_total{{key="{OTHERS}",outcome="answered"}} 5.0' in text
    assert f'baton:key_active_requests{{key="{OTHERS}"}} 5.0' in text


def test_a_call_without_a_key_is_not_counted() -> None:
    metrics = KeyMetrics(dict, Counter[str])
    metrics.observe(ended(""))
    assert "{" not in text_of(metrics)
