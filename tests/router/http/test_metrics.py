"""Metrics: every family as it is declared, and what requests, keys, streams and stalls come to in them."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from baton.process.security.api_keys import KeyLimits
from baton.router.dispatcher import RequestCounts
from baton.router.http.key_metrics import MAX_NAMES, OTHERS, KeyMetrics
from baton.router.http.metric_families import DESIRED_REPLICAS, FAMILIES, HistogramFamily, TraceLink
from baton.router.http.metrics import RequestMetrics, StallMetrics, StreamMetrics, exposition
from baton.router.placement.decide import Placement
from baton.router.request.journal import Journal, JournalStore, Streams
from baton.router.trace.record import ANSWERED, AttemptNote, RequestEnd, RequestOutcome, RequestRecord, Resume, Timeline
from baton.router.types.events import Failed, FailureReason
from baton.router.types.request import Operation
from baton.text.causes import StallCause
from tests.fixtures.stalled import WAITED, blamed, stalled
from tests.router.http.conftest import WAIT_S, Gateway


def exposed(collector: Collector) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry).decode()


LINK = TraceLink("0" * 31 + "a", 1000.0)
SCRAPER = "application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


class OneHistogram(Collector):
    """A registry's only metric, with values in two buckets."""

    def collect(self) -> Iterable[Metric]:
        histogram = HistogramFamily("baton:x_seconds", "X.", ("a",), bounds=(0.1, 1.0)).histogram()
        histogram.labels("1").observe_all([0.05], LINK)
        histogram.labels("1").observe_all([0.07], LINK._replace(trace_id="b" * 32))
        histogram.labels("1").observe_all([0.5], None)
        return histogram.collect()


def registry() -> CollectorRegistry:
    made = CollectorRegistry(auto_describe=False)
    made.register(OneHistogram())
    return made


def test_bucket_shows_the_trace_of_its_newest_value() -> None:
    text = exposition(registry(), SCRAPER).body.decode()
    [family] = openmetrics.text_string_to_metric_families(text)
    exemplars = {each.labels["le"]: each.exemplar for each in family.samples if each.name == "baton:x_seconds_bucket"}
    assert exemplars["0.1"].labels == {"trace_id": "b" * 32}
    assert (exemplars["0.1"].value, float(exemplars["0.1"].timestamp)) == (0.07, 1000.0)
    assert exemplars["1.0"] is None and exemplars["+Inf"] is None


def test_format_is_the_scrapers_preferred_one() -> None:
    plain = "text/plain; version=0.0.4; charset=utf-8"
    of = {accept: exposition(registry(), accept).media_type for accept in (
        "", "*/*", "text/plain", SCRAPER, "application/openmetrics-text",
        "application/openmetrics-text;q=0.2, text/plain;q=0.9", "application/openmetrics-text;version=abc",
        "application/openmetrics-text;q=none", "application/openmetrics-text;q=0",
    )}  # fmt: skip
    asked = {accept for accept, media_type in of.items() if media_type.startswith("application/openmetrics-text")}
    assert asked == {SCRAPER, "application/openmetrics-text", "application/openmetrics-text;version=abc"}
    assert set(of.values()) - {of[SCRAPER]} == {plain}


async def test_every_family_of_a_router_is_declared_and_every_declared_one_is_there(gateway: Gateway) -> None:
    gateway.says("hello")
    await gateway.post("/v1/completions", prompt="abc", max_tokens=4)
    text = (await gateway.client.get("/metrics")).text
    shown = {family.name: family for family in text_string_to_metric_families(text)}
    without_keys = {name for name in FAMILIES if not name.startswith("baton:key_")}
    without_redis = without_keys - {"baton:journal_records"}
    assert shown.keys() == without_redis
    for name, family in shown.items():
        labels = set(FAMILIES[name].labels) | ({"le"} if isinstance(FAMILIES[name], HistogramFamily) else set())
        assert all(sample.labels.keys() <= labels for sample in family.samples), name
        assert {sample.name for sample in family.samples} <= set(FAMILIES[name].series), name


async def test_openmetrics_scrape_links_latencies_to_traces(gateway: Gateway) -> None:
    gateway.says("hello")
    trace_id = "c" * 32
    headers = {"traceparent": f"00-{trace_id}-{'1' * 16}-01"}
    body = {"prompt": "abc", "max_tokens": 4}
    assert (await gateway.client.post("/v1/completions", json=body, headers=headers)).status_code == 200

    answer = await gateway.client.get("/metrics", headers={"accept": SCRAPER})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    samples = [
        sample for family in openmetrics.text_string_to_metric_families(answer.text) for sample in family.samples
    ]
    linked = {sample.name for sample in samples if sample.exemplar and sample.exemplar.labels["trace_id"] == trace_id}
    assert {"vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket"} <= linked
    assert "vllm:e2e_request_latency_seconds_bucket" in linked


async def test_request_without_a_sampled_trace_is_not_linked(gateway: Gateway) -> None:
    gateway.says("hello")
    headers = {"traceparent": f"00-{'d' * 32}-{'1' * 16}-00"}
    await gateway.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4}, headers=headers)
    text = (await gateway.client.get("/metrics", headers={"accept": SCRAPER})).text
    assert "vllm:time_to_first_token_seconds_count" in text and "d" * 32 not in text


def test_names_are_the_same_in_both_formats() -> None:
    for accept in ("text/plain", SCRAPER):
        assert '\nbaton:x_seconds_bucket{a="1",le="0.1"} 2.0' in exposition(registry(), accept).body.decode()


async def test_desired_replicas_equal_present_workers_after_a_start(gateway: Gateway) -> None:
    shown = dict[str, float]()
    async with asyncio.timeout(WAIT_S):
        while set(shown) != {"prefill", "decode"}:
            text = (await gateway.client.get("/metrics")).text
            [family] = [each for each in text_string_to_metric_families(text) if each.name == DESIRED_REPLICAS.name]
            shown = {sample.labels["role"]: sample.value for sample in family.samples}
            await asyncio.sleep(0.05)
    assert shown == {"prefill": 1.0, "decode": 1.0}


LIMITED = RequestEnd(RequestOutcome.REFUSED, "tokens_per_minute", "RESOURCE_EXHAUSTED")


def ended(tenant: str, end: RequestEnd = ANSWERED, ttft_s: float | None = None) -> RequestRecord:
    timeline = Timeline(0.0, first_token_s=ttft_s)
    record = replace(RequestRecord.begin(Operation.GENERATE, None), tenant=tenant, timeline=timeline)
    record.end, record.delivered_tokens = end, 7
    return record


def test_requests_tokens_limits_and_latency_are_counted_by_key_name() -> None:
    metrics = KeyMetrics(lambda: {"alice": KeyLimits(tokens_per_minute=60)}, lambda: Counter(alice=2))
    metrics.observe(ended("alice", ttft_s=0.2))
    metrics.observe(ended("alice", LIMITED))
    text = exposed(metrics)
    assert 'baton:key_requests_ended_total{key="alice",outcome="answered"} 1.0' in text
    assert 'baton:key_requests_limited_total{key="alice",limit="tokens_per_minute"} 1.0' in text
    assert 'baton:key_generation_tokens_total{key="alice"} 14.0' in text
    assert 'baton:key_active_requests{key="alice"} 2.0' in text
    assert 'baton:key_time_to_first_token_seconds_bucket{key="alice",le="0.25"} 1.0' in text
    assert 'baton:key_limit{key="alice",limit="tokens_per_minute"} 60.0' in text


def test_key_that_was_never_used_is_zero() -> None:
    text = exposed(KeyMetrics(lambda: {"bob": KeyLimits()}, Counter[str]))
    assert 'baton:key_requests_ended_total{key="bob",outcome="failed"} 0.0' in text


def test_names_beyond_the_bound_share_one_label() -> None:
    metrics = KeyMetrics(dict, lambda: Counter({f"k{number}": 1 for number in range(MAX_NAMES + 5)}))
    for number in range(MAX_NAMES + 5):
        metrics.observe(ended(f"k{number}"))
    text = exposed(metrics)
    assert text.count('outcome="answered"') == MAX_NAMES + 1
    assert f'baton:key_requests_ended_total{{key="{OTHERS}",outcome="answered"}} 5.0' in text
    assert f'baton:key_active_requests{{key="{OTHERS}"}} 5.0' in text


def test_call_without_a_key_is_not_counted() -> None:
    metrics = KeyMetrics(dict, Counter[str])
    metrics.observe(ended(""))
    assert "{" not in exposed(metrics)


class NoStore(JournalStore):
    async def close(self) -> None: ...


def test_records_are_counted_by_outcome() -> None:
    journal = Journal(NoStore(), b"r" * 16, lambda record: b"", lambda stream: None)  # type: ignore[abstract]
    journal.counts.written, journal.counts.dropped = 5, 2
    streams = Streams(b"r" * 16, journal, lambda router_id, stream: None)
    streams.resumed = 3
    text = exposed(StreamMetrics(streams, journal))
    assert "baton:client_resumes_total 3.0" in text
    assert 'baton:journal_records_total{outcome="written"} 5.0' in text
    assert 'baton:journal_records_total{outcome="dropped"} 2.0' in text


def test_journal_metrics_are_absent_without_redis() -> None:
    text = exposed(StreamMetrics(Streams(b"r" * 16, None, lambda router_id, stream: None), None))
    assert "baton:client_resumes_total 0.0" in text
    assert "journal" not in text


PLACED = Placement("p", "d", 0, 0, 0, 0, 1, 1)


def test_failed_attempts_and_resumed_streams_are_counted_with_their_gaps() -> None:
    nothing: Any = None
    timeline = Timeline(0.0)
    for reason in (FailureReason.WORKER_DIED, None):
        failed = Failed(1, "d", reason, "") if reason else None
        timeline.notes.append(AttemptNote(nothing, PLACED, None, 0.0, 0.0, failed=failed))
    timeline.resumes.append(Resume(2.0, 700.0, 0, 5))
    begun = RequestRecord.begin(Operation.GENERATE, None)
    record = replace(begun, model="m", timeline=timeline)
    metrics = RequestMetrics(RequestCounts())
    metrics.observe(record)
    text = exposed(metrics)
    assert 'baton:attempts_failed_total{reason="worker_died"} 1.0' in text
    assert 'baton:streams_resumed_total{engine="router",model_name="m"} 1.0' in text
    assert 'baton:resume_gap_seconds_bucket{engine="router",le="0.75",model_name="m"} 1.0' in text
    assert 'baton:resume_gap_seconds_bucket{engine="router",le="0.5",model_name="m"} 0.0' in text


def counted(metrics: StallMetrics) -> list[str]:
    """Samples other than zeros."""
    lines = [line for line in exposed(metrics).splitlines() if line[0] != "#" and not line.endswith(" 0.0")]
    return [line.removeprefix("baton:") for line in lines]


def test_stall_counts_for_its_longest_cause_and_its_time_for_each() -> None:
    metrics = StallMetrics(lambda: 1.5)
    metrics.observe(stalled("a", (blamed("b", 80.0), WAITED), (blamed("c", 40.0),)))
    metrics.observe(stalled("d", (WAITED,)))

    assert counted(metrics) == [
        'stalls_total{cause="prompt_tokens"} 2.0',
        'stalls_total{cause="cpu_wait"} 1.0',
        'stall_seconds_total{cause="prompt_tokens"} 0.12',
        'stall_seconds_total{cause="cpu_wait"} 0.02',
        "event_loop_busy_seconds_total 1.5",
    ]


def test_stall_without_a_cause_counts_as_unknown() -> None:
    metrics = StallMetrics(lambda: 0.0)
    metrics.observe(stalled("a", ()))
    assert counted(metrics) == ['stalls_total{cause="unknown"} 1.0']


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
