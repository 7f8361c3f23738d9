"""Families as they are declared, and histograms with the traces of their newest values."""

import asyncio
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from baton.router.http.metric_families import DESIRED_REPLICAS, FAMILIES, HistogramFamily, TraceLink
from baton.router.http.metrics import exposition
from tests.router.http.conftest import Gateway

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


def test_a_bucket_shows_the_trace_of_its_newest_value() -> None:
    text = exposition(registry(), SCRAPER).body.decode()
    [family] = openmetrics.text_string_to_metric_families(text)
    exemplars = {each.labels["le"]: each.exemplar for each in family.samples if each.name == "baton:x_seconds_bucket"}
    assert exemplars["0.1"].labels == {"trace_id": "b" * 32}
    assert (exemplars["0.1"].value, float(exemplars["0.1"].timestamp)) == (0.07, 1000.0)
    assert exemplars["1.0"] is None and exemplars["+Inf"] is None


def test_the_format_is_the_one_that_the_scraper_prefers() -> None:
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


async def test_a_scrape_in_openmetrics_links_latencies_to_the_traces_of_their_requests(gateway: Gateway) -> None:
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


async def test_a_request_whose_caller_keeps_no_trace_is_not_linked(gateway: Gateway) -> None:
    gateway.says("hello")
    headers = {"traceparent": f"00-{'d' * 32}-{'1' * 16}-00"}
    await gateway.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4}, headers=headers)
    text = (await gateway.client.get("/metrics", headers={"accept": SCRAPER})).text
    assert "vllm:time_to_first_token_seconds_count" in text and "d" * 32 not in text


def test_names_are_the_same_in_both_formats() -> None:
    for accept in ("text/plain", SCRAPER):
        assert '\nbaton:x_seconds_bucket{a="1",le="0.1"} 2.0' in exposition(registry(), accept).body.decode()


async def test_the_workers_that_there_should_be_are_those_that_are_there_when_a_router_has_started(
    gateway: Gateway,
) -> None:
    shown = dict[str, float]()
    async with asyncio.timeout(10.0):
        while set(shown) != {"prefill", "decode"}:
            text = (await gateway.client.get("/metrics")).text
            [family] = [each for each in text_string_to_metric_families(text) if each.name == DESIRED_REPLICAS.name]
            shown = {sample.labels["role"]: sample.value for sample in family.samples}
            await asyncio.sleep(0.05)
    assert shown == {"prefill": 1.0, "decode": 1.0}
