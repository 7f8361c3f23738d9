"""Declarations of a router's metrics: name, help, labels, buckets, and how to read those that workers report.

The collectors take names and labels from here, and so does the generator of dashboards and alerts (`lab/dashboards/`).
Metrics that vLLM has, too, have vLLM's names, since existing dashboards use them.
"""

import collections
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple

from prometheus_client import Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar

from baton.router.types.worker import SessionReport, TierReport, WorkerDescription, WorkerReport

disable_created_metrics()  # a `_created` series per counter and histogram would double the size of /metrics

# fmt: off
TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
TOKEN_GAP_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
REQUEST_S = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)
KEY_TTFT_S = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# fmt: on
TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
SMALL_COUNTS = (1, 2, 5, 10, 20)
"""Bounds of buckets: those of vLLM and smaller ones. API keys have fewer, since each key has a series per bucket."""
LABELS = ("model_name", "engine")


class Source(Enum):
    """Process that a series describes. It decides how to combine the series of several routers."""

    ROUTER = "router"  # each router has its own values: add them up or show them by router
    WORKER = "worker"  # every router repeats the workers' reports: take the largest value per worker


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """Declaration of a metric: name, help, labels and source."""

    name: str
    help_text: str
    labels: tuple[str, ...] = ()
    source: Source = Source.ROUTER

    @property
    def series(self) -> tuple[str, ...]:
        """Names of the metric's time series."""
        return (self.name,)


class LiveFamily(MetricFamily):
    """Declaration of a metric whose values are read at each scrape."""

    _kind: ClassVar[type[GaugeMetricFamily | CounterMetricFamily]]

    def filled(self, values: Mapping[tuple[str, ...], float]) -> Metric:
        """Return the metric with these values. Keys: values of its labels, in order."""
        metric = self._kind(self.name, self.help_text, labels=self.labels)
        for labels, value in values.items():
            metric.add_metric(labels, value)
        return metric


class GaugeFamily(LiveFamily):
    _kind = GaugeMetricFamily


class CounterFamily(LiveFamily):
    """Declaration of a counter. `name` is without the suffix `_total` of its time series."""

    _kind = CounterMetricFamily

    @property
    def series(self) -> tuple[str, ...]:
        return (f"{self.name}_total",)

    def counter(self) -> Counter:
        return Counter(self.name, self.help_text, self.labels, registry=None)


@dataclass(frozen=True, slots=True)
class HistogramFamily(MetricFamily):
    """Declaration of a histogram. `bounds`: upper bounds of its buckets."""

    bounds: tuple[float, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        return (f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count")

    def histogram(self) -> "TracedHistogram":
        return TracedHistogram(self.name, self.help_text, self.labels, buckets=self.bounds, registry=None)


class TraceLink(NamedTuple):
    """Link from a measured value to the trace of its request."""

    trace_id: str  # 32 hexadecimal digits
    time_s: float  # time of the measurement, seconds since 1970


class TracedHistogram(Histogram):
    """Histogram that adds many values in one call, and keeps for each bucket the trace of its newest value.

    `Histogram.observe` takes 2 µs per value, and 7 µs with a trace. For the thousands of token gaps of a long answer,
    that would block the event loop for milliseconds.
    """

    def observe_all(self, values: Sequence[float], link: TraceLink | None) -> None:
        """Add the values. `link`: trace of their request; None: it has no sampled trace."""
        buckets = [bisect_left(self._upper_bounds, value) for value in values]
        self._sum.inc(sum(values))
        for bucket, count in collections.Counter(buckets).items():
            self._buckets[bucket].inc(count)
        if link is not None:
            for bucket, value in dict(zip(buckets, values, strict=True)).items():
                self._buckets[bucket].set_exemplar(Exemplar({"trace_id": link.trace_id}, value, link.time_s))


def _histogram(name: str, help_text: str, bounds: tuple[float, ...]) -> HistogramFamily:
    return HistogramFamily(name, help_text, LABELS, bounds=bounds)


REQUEST_HISTOGRAMS = (
    _histogram("vllm:time_to_first_token_seconds", "Time from arrival to the first token.", TTFT_S),
    _histogram("vllm:inter_token_latency_seconds", "Time between two tokens of one choice.", TOKEN_GAP_S),
    _histogram("vllm:request_time_per_output_token_seconds", "Mean time per token after the first.", TOKEN_GAP_S),
    _histogram("vllm:e2e_request_latency_seconds", "Time from arrival to completion.", REQUEST_S),
    _histogram("vllm:request_queue_time_seconds", "Time in the queues of router and prefill worker.", REQUEST_S),
    _histogram("vllm:request_prefill_time_seconds", "Time of prefill.", REQUEST_S),
    _histogram("vllm:request_decode_time_seconds", "Time from the first token to the last.", REQUEST_S),
    _histogram("vllm:request_inference_time_seconds", "Time of prefill and decode.", REQUEST_S),
    _histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", TOKENS),
    _histogram("vllm:request_generation_tokens", "Generated tokens per request.", TOKENS),
    _histogram("vllm:request_params_n", "Requested choices (n).", SMALL_COUNTS),
    _histogram("vllm:request_params_max_tokens", "Maximum number of tokens per choice (max_tokens).", TOKENS),
    _histogram("baton:kv_transfer_exposed_seconds", "Time for which a client waited for a KV transfer.", TTFT_S),
    _histogram("baton:resume_gap_seconds", "Time between the tokens before and after a failover.", TOKEN_GAP_S),
)
REQUEST_COUNTERS = (
    CounterFamily("vllm:prompt_tokens_cached", "Prompt tokens whose KV was cached.", LABELS),
    CounterFamily("baton:kv_transfer_bytes", "Bytes of KV pulled by decode workers.", LABELS),
    CounterFamily("baton:streams_resumed", "Requests that failed over after their first token.", LABELS),
    CounterFamily("baton:placed_pool_tokens", "Prompt tokens found in the pool of the chosen worker.", LABELS),
    CounterFamily("baton:placed_file_tokens", "Prompt tokens that the chosen worker should load from files.", LABELS),
    CounterFamily("baton:restored_tokens", "Prompt tokens whose KV was loaded from files.", LABELS),
)
"""Counters by model that count finished requests."""

CHOICES_ENDED = CounterFamily("vllm:request_success", "Finished choices, by reason.", (*LABELS, "finished_reason"))
ATTEMPTS_FAILED = CounterFamily("baton:attempts_failed", "Failed attempts, by reason.", ("reason",))
PROMPT_TOKENS = CounterFamily("vllm:prompt_tokens", "Prompt tokens dispatched to workers.", LABELS)
GENERATED_TOKENS = CounterFamily("vllm:generation_tokens", "Generated tokens sent to clients.", LABELS)
REQUESTS_STARTED = CounterFamily("baton:requests_started", "Requests received.")
REQUESTS_ENDED = CounterFamily(
    "baton:requests_ended",
    "Requests by outcome: answered, cancelled, refused before dispatch, or failed.",
    ("outcome", "reason"),
)


STALLS = CounterFamily(
    "baton:stalls", "Unusually long gaps between tokens, by main cause; at most 32 per request.", ("cause",)
)
STALL_SECONDS = CounterFamily("baton:stall_seconds", "Time of stalls beyond the usual gap, by cause.", ("cause",))
LOOP_BUSY = CounterFamily(
    "baton:event_loop_busy_seconds", "Time for which the router's event loop was blocked for 2 ms or longer."
)


def _worker_gauge(name: str, help_text: str) -> GaugeFamily:
    return GaugeFamily(name, help_text, LABELS, Source.WORKER)


def _worker_counter(name: str, help_text: str, labels: tuple[str, ...] = LABELS) -> CounterFamily:
    return CounterFamily(name, help_text, labels, Source.WORKER)


TIER_KNOWN = _worker_gauge("baton:kv_tier_known_blocks", "Blocks in the worker's files that the router knows.")
EVICTED_BLOCKS = _worker_counter(
    "baton:kv_evicted_blocks",
    "Blocks evicted from the pool, by kind: of done sessions, protected by a session, or other.",
    (*LABELS, "kind"),
)
KV_BLOCKS = GaugeFamily("baton:kv_blocks", "KV blocks, by state.", (*LABELS, "state"), Source.WORKER)
LINKS = GaugeFamily(
    "baton:link_gb_per_s",
    "Bandwidth between two workers, measured when they paired.",
    ("engine", "to", "transport"),
    Source.WORKER,
)
CACHE_CONFIG = GaugeFamily(
    "vllm:cache_config_info", "Size and number of KV blocks.", (*LABELS, "block_size", "num_gpu_blocks"), Source.WORKER
)


class WorkerMetric(NamedTuple):
    """A metric that workers report. `read` returns its values for one worker.

    Keys: values of the labels that follow model and worker.
    """

    family: GaugeFamily | CounterFamily
    read: Callable[[WorkerDescription, WorkerReport], Mapping[tuple[str, ...], float]]


Read = Callable[[WorkerReport], float | None]
"""Function that returns a value from a worker's report; None if the worker does not measure it."""


def _gauge(name: str, help_text: str, read: Read) -> WorkerMetric:
    return WorkerMetric(_worker_gauge(name, help_text), _single(read))


def _counter(name: str, help_text: str, read: Read) -> WorkerMetric:
    return WorkerMetric(_worker_counter(name, help_text), _single(read))


def _single(read: Read) -> Callable[[WorkerDescription, WorkerReport], Mapping[tuple[str, ...], float]]:
    return lambda worker, report: {} if (value := read(report)) is None else {(): float(value)}


def _tier(read: Callable[[TierReport], float]) -> Read:
    return lambda report: None if report.tier is None else read(report.tier)


def _sessions(read: Callable[[SessionReport], float]) -> Read:
    return lambda report: read(report.sessions)


_BLOCK_STATES = ("free", "cached", "held_by_sequences", "held_by_transfers")


def _held_share(report: WorkerReport) -> float:
    return report.pages.held / report.pages.total if report.pages.total else 0.0


WORKER_METRICS = (
    _gauge("vllm:num_requests_running", "Sequences in the batch.", lambda r: r.running_sequences),
    _gauge("vllm:num_requests_waiting", "Requests queued in the worker.", lambda r: r.waiting_requests),
    _gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use.", _held_share),
    _gauge("vllm:gpu_cache_usage_perc", "Older name of vllm:kv_cache_usage_perc.", _held_share),
    _gauge("baton:pending_tokens", "Prompt tokens not computed yet.", lambda r: r.pending_tokens),
    _counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda r: r.cache_query_tokens),
    _counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", lambda r: r.cache_hit_tokens),
    _counter("baton:kv_blocks_checked", "Received blocks compared by checksum.", lambda r: r.checked_blocks),
    _counter("baton:kv_checksum_mismatches", "Received blocks that were corrupt.", lambda r: r.checksum_mismatches),
    _counter(
        "baton:kv_at_rest_checked_blocks", "Cached blocks checked before use.", lambda r: r.checked_at_rest_blocks
    ),
    _counter("baton:kv_at_rest_corrupt_blocks", "Cached blocks found corrupt.", lambda r: r.corrupt_at_rest_blocks),
    _counter("baton:steps", "Engine steps.", lambda r: r.steps),
    _counter("vllm:num_preemptions", "Preempted sequences.", lambda r: r.preemptions),
    _counter("vllm:spec_decode_num_drafts", "Drafts of speculative decoding.", lambda r: r.drafts),
    _counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", lambda r: r.drafted_tokens),
    _counter("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.", lambda r: sum(r.accepted_tokens)),
    _counter("baton:spec_decode_gained_seconds", "Time saved by drafts, per answer.", lambda r: r.drafts_gained_s),
    _counter("baton:spec_decode_lost_seconds", "Time added to steps by drafts, per answer.", lambda r: r.drafts_lost_s),
    _gauge("baton:kv_tier_blocks", "Blocks in files that the worker can load.", _tier(lambda t: t.blocks)),
    _gauge("baton:kv_tier_bytes", "Size of the worker's own files.", _tier(lambda t: t.size_bytes)),
    _gauge("baton:kv_tier_memory_blocks", "Blocks in --kv-tier-memory.", _tier(lambda t: t.memory_blocks)),
    _gauge("baton:kv_tier_memory_bytes", "Used bytes of --kv-tier-memory.", _tier(lambda t: t.memory_bytes)),
    _gauge("baton:kv_tier_reads", "1 if files are read, 0 while their disk fails.", _tier(lambda t: t.reads)),
    _gauge(
        "baton:kv_tier_writes", "1 if files are written, 0 if the disk fails or is full.", _tier(lambda t: t.writes)
    ),
    _counter("baton:kv_tier_queries", "Prompt blocks missing in the pool.", _tier(lambda t: t.queried_blocks)),
    _counter("baton:kv_tier_hits", "Prompt blocks loaded from files.", _tier(lambda t: t.hit_blocks)),
    _counter("baton:kv_tier_corrupt_blocks", "Corrupt blocks in files.", _tier(lambda t: t.corrupt_blocks)),
    _counter("baton:kv_tier_loaded_bytes", "Bytes loaded from files.", _tier(lambda t: t.loaded_bytes)),
    _counter("baton:kv_tier_stored_bytes", "Bytes written to files.", _tier(lambda t: t.stored_bytes)),
    _counter("baton:kv_tier_dropped_blocks", "Blocks dropped before a write.", _tier(lambda t: t.dropped_blocks)),
    _counter("baton:kv_tier_evicted_blocks", "Blocks whose files were removed.", _tier(lambda t: t.evicted_blocks)),
    _gauge("baton:kv_sessions", "Sessions known to the worker.", _sessions(lambda s: s.known)),
    _gauge("baton:kv_protected_blocks", "Cached blocks kept for sessions.", _sessions(lambda s: s.protected_blocks)),
    _counter(
        "baton:kv_prefetched_blocks",
        "Blocks loaded from files before the next turn of their session.",
        _sessions(lambda s: s.prefetched_blocks),
    ),
    _counter(
        "baton:kv_prefetched_used_blocks",
        "Prefetched blocks that were used.",
        _sessions(lambda s: s.prefetched_used_blocks),
    ),
    _counter(
        "baton:kv_taken_over_blocks",
        "Blocks of sessions received from workers that left.",
        _sessions(lambda s: s.taken_over_blocks),
    ),
    WorkerMetric(
        EVICTED_BLOCKS,
        lambda worker, report: {
            (kind,): getattr(report.sessions, f"evicted_{kind}_blocks") for kind in ("done", "other", "protected")
        },
    ),
    WorkerMetric(KV_BLOCKS, lambda worker, report: {(state,): getattr(report.pages, state) for state in _BLOCK_STATES}),
    WorkerMetric(
        LINKS, lambda worker, report: {(link.endpoint, link.transport): link.gb_per_s for link in report.links}
    ),
    WorkerMetric(CACHE_CONFIG, lambda worker, report: {(str(worker.model.block_tokens), str(worker.total_blocks)): 1}),
    WorkerMetric(
        _worker_counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens, by position in the draft.",
            (*LABELS, "position"),
        ),
        lambda worker, report: {(str(at),): tokens for at, tokens in enumerate(report.accepted_tokens or (0,))},
    ),
)

BUILD_INFO = GaugeFamily(
    "baton_build_info",
    "1 for this router and each worker, with its version.",
    ("engine", "version", "protocol"),
    Source.WORKER,
)
REFUSED_WORKERS = GaugeFamily(
    "baton:refused_workers", "Live workers that get no requests, since they do not fit the others."
)
WORKERS = GaugeFamily("baton:workers", "Connected workers, by role.", ("role",))
DESIRED_REPLICAS = GaugeFamily(
    "baton:desired_replicas",
    "Number of workers that the SLOs need, by role: the maximum over routers. Absent with --planner off and for a role "
    "without a worker so far.",
    ("role",),
)
DEPARTURES: Mapping[str, CounterFamily] = {
    "deaths": _worker_counter("baton:worker_deaths", "Worker processes that exited without draining.", ("engine",)),
    "drains": _worker_counter("baton:worker_drains", "Worker processes that drained and exited.", ("engine",)),
    "role_changes": _worker_counter("baton:worker_role_changes", "Changes of a worker's role.", ("engine",)),
    "lost_sessions": _worker_counter(
        "baton:worker_lost_sessions", "Links lost to silence, or not reconnected in time.", ("engine",)
    ),
}
"""Counters by field of `Departures` (counts of a worker's lost links) from which they are read."""

ACTIVE_REQUESTS = GaugeFamily("baton:active_requests", "In-flight requests.")
QUEUED_REQUESTS = GaugeFamily("baton:queued_requests", "Requests in the router's queue.")
READY = GaugeFamily("baton:ready", "1 if the last readiness probe succeeded.")
HTTP_CONNECTIONS = GaugeFamily("baton:http_connections", "Open HTTP connections.")
HTTP_WITHOUT_ROOM = CounterFamily(
    "baton:http_connections_without_room",
    "Connections rejected or closed at a limit: refused (--http-max-connections busy ones), closed_idle (the longest "
    "idle one, for a new one), no_descriptors.",
    ("reason",),
)
REGISTRY_CONNECTED = GaugeFamily("baton:registry_connected", "0 if Redis does not answer or rejects writes.")
OWN_GAUGES = (ACTIVE_REQUESTS, QUEUED_REQUESTS, READY, HTTP_CONNECTIONS, REGISTRY_CONNECTED)

TOKENS_READ = CounterFamily("baton:prompt_tokens_read", "Prompt tokens that the router tokenised.", LABELS)
TOKENS_KNOWN = CounterFamily("baton:prompt_tokens_known", "Prompt tokens reused from an earlier prompt's text.", LABELS)

CLIENT_RESUMES = CounterFamily("baton:client_resumes", "Streams that a client resumed at this router.")
JOURNAL_RECORDS = CounterFamily("baton:journal_records", "Journal writes, by outcome.", ("outcome",))

KEY_REQUESTS = CounterFamily("baton:key_requests_ended", "Finished requests of an API key.", ("key", "outcome"))
KEY_LIMITED = CounterFamily("baton:key_requests_limited", "Requests rejected by an API key's limit.", ("key", "limit"))
KEY_PROMPT_TOKENS = CounterFamily("baton:key_prompt_tokens", "Prompt tokens, by API key.", ("key",))
KEY_GENERATED_TOKENS = CounterFamily("baton:key_generation_tokens", "Generated tokens, by API key.", ("key",))
KEY_ACTIVE = GaugeFamily("baton:key_active_requests", "In-flight requests, by API key.", ("key",))
KEY_TTFT = HistogramFamily(
    "baton:key_time_to_first_token_seconds", "Time to the first token, by API key.", ("key",), bounds=KEY_TTFT_S
)
KEY_LIMITS = GaugeFamily("baton:key_limit", "Limits of an API key.", ("key", "limit"))
KEY_FAMILIES = (KEY_REQUESTS, KEY_LIMITED, KEY_PROMPT_TOKENS, KEY_GENERATED_TOKENS, KEY_ACTIVE, KEY_TTFT, KEY_LIMITS)
"""Metrics of a router that has API keys."""

FAMILIES: Mapping[str, MetricFamily] = {
    family.name: family
    for family in (
        *REQUEST_HISTOGRAMS,
        *REQUEST_COUNTERS,
        *(CHOICES_ENDED, ATTEMPTS_FAILED, PROMPT_TOKENS, GENERATED_TOKENS, REQUESTS_STARTED, REQUESTS_ENDED),
        *(STALLS, STALL_SECONDS, LOOP_BUSY),
        *(metric.family for metric in WORKER_METRICS),
        *(TIER_KNOWN, BUILD_INFO, REFUSED_WORKERS, WORKERS, DESIRED_REPLICAS),
        *DEPARTURES.values(),
        *(*OWN_GAUGES, HTTP_WITHOUT_ROOM),
        *(TOKENS_READ, TOKENS_KNOWN),
        *(CLIENT_RESUMES, JOURNAL_RECORDS),
        *KEY_FAMILIES,
    )
}
"""Metrics by name."""
