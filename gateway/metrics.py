"""/metrics: of this router's requests, over HTTP and gRPC alike, of the workers, and of resumed streams.

Requests and tokens are counted as they happen, the rest once each has ended; workers are read at the moment of the
scrape. Names are vLLM's where it has one, since dashboards know them.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.router.admission.queue import AdmissionQueue
from baton.router.dispatcher import Dispatcher, RequestCounts
from baton.router.placement.cluster import Cluster
from baton.router.readiness import Readiness
from baton.router.request.journal import Journal, Streams
from baton.router.trace.record import Outcome, RequestRecord, stages
from baton.router.types.response import Stages
from baton.router.types.worker import WorkerDescription, WorkerReport

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
# fmt: on
TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
SMALL_COUNTS = (1, 2, 5, 10, 20)
"""vLLM's buckets, and finer ones below them."""
ENGINE = "router"
LABELS = ("model_name", "engine")


class Histogram:
    """Counts of values by upper bounds, as Prometheus has them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Iterable[float]) -> None:
        for value in values:
            self.observe(value)

    @property
    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it), and all of them at the end."""
        so_far, rows = 0, []
        for bound, count in zip((*map(_bound, self._bounds), "+Inf"), self._counts, strict=True):
            so_far += count
            rows.append((bound, float(so_far)))
        return rows


def _bound(value: float) -> str:
    return repr(float(value))


_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "vllm:time_to_first_token_seconds": ("From arrival to the first token.", TTFT_S),
    "vllm:inter_token_latency_seconds": ("Between two tokens of one choice.", TOKEN_GAP_S),
    "vllm:request_time_per_output_token_seconds": ("Mean time per token after the first.", TOKEN_GAP_S),
    "vllm:e2e_request_latency_seconds": ("From arrival to the end.", REQUEST_S),
    "vllm:request_queue_time_seconds": ("Waiting, in the router and in the prefill worker.", REQUEST_S),
    "vllm:request_prefill_time_seconds": ("Computing the prompt.", REQUEST_S),
    "vllm:request_decode_time_seconds": ("From the first token to the last.", REQUEST_S),
    "vllm:request_inference_time_seconds": ("Prefill and decode.", REQUEST_S),
    "vllm:request_prompt_tokens": ("Tokens of the prompt.", TOKENS),
    "vllm:request_generation_tokens": ("Tokens of the answers.", TOKENS),
    "vllm:request_params_n": ("Choices asked for.", SMALL_COUNTS),
    "vllm:request_params_max_tokens": ("Most tokens of a choice.", TOKENS),
    "baton:kv_transfer_exposed_seconds": ("Of the KV transfer, what the client waited for.", TTFT_S),
    "baton:resume_gap_seconds": ("Between two tokens of a choice that went on with another attempt.", TOKEN_GAP_S),
}
_COUNTERS: Mapping[str, str] = {
    "vllm:prompt_tokens_cached": "Tokens of prompts whose KV was in a cache.",
    "baton:kv_transfer_bytes": "KV that decode workers pulled.",
    "baton:streams_resumed": "Requests that went on with another attempt, some of whose answer was out.",
}


class RequestMetrics(Collector):
    """`observe` is called with every request that has ended; `counts` has those that run too."""

    def __init__(self, counts: RequestCounts) -> None:
        self._counts = counts
        self._histograms: dict[str, dict[str, Histogram]] = {}  # by model, by name
        self._counters: Counter[tuple[str, str]] = Counter()  # by name and model
        self._ended: Counter[tuple[str, str]] = Counter()  # by model and reason
        self._attempts_failed: Counter[str] = Counter()  # by reason

    def observe(self, record: RequestRecord) -> None:
        model, summary, timeline = record.model, record.summary, record.timeline
        self._attempts_failed.update(note.failed.reason.name.lower() for note in timeline.notes if note.failed)
        if timeline.resumes:
            self._counters["baton:streams_resumed", model] += 1
            gaps_s = [resume.gap_ms / 1e3 for resume in timeline.resumes]
            self._of(model)["baton:resume_gap_seconds"].observe_all(gaps_s)
        for reason in record.finish_reasons:
            self._ended[model, reason] += 1
        if record.end is not None and record.end.outcome is Outcome.CANCELLED:
            choices = record.prepared.valid.n if record.prepared is not None else 1
            self._ended[model, "abort"] += choices - len(record.finish_reasons)
        if timeline.prefill is not None:
            self._counters["vllm:prompt_tokens_cached", model] += timeline.prefill.cached_tokens
        if received := [note.kv_received for note in timeline.notes if note.kv_received is not None]:
            self._counters["baton:kv_transfer_bytes", model] += sum(each.transferred_bytes for each in received)
        measured = stages(timeline, timeline.ended_s or timeline.arrived_s)
        if timeline.first_token_s is not None:  # also of those that were cancelled: they may be the slow ones
            observed = self._of(model)
            observed["vllm:time_to_first_token_seconds"].observe(measured.ttft_ms / 1e3)
            observed["vllm:inter_token_latency_seconds"].observe_all(gap_ms / 1e3 for gap_ms in timeline.gaps.each_ms)
        if summary is None or record.prepared is None:
            return
        observed = self._of(model)
        usage, sampling = summary.usage, record.prepared.sampling
        for name, value in _durations(measured).items():
            observed[name].observe(value)
        later = usage.completion_tokens - record.prepared.valid.n
        if timeline.first_token_s is not None and timeline.last_token_s is not None and later > 0:
            spent_s = timeline.last_token_s - timeline.first_token_s
            observed["vllm:request_decode_time_seconds"].observe(spent_s)
            observed["vllm:request_time_per_output_token_seconds"].observe(spent_s * record.prepared.valid.n / later)
        observed["vllm:request_prompt_tokens"].observe(usage.prompt_tokens)
        observed["vllm:request_generation_tokens"].observe(usage.completion_tokens)
        observed["vllm:request_params_n"].observe(record.prepared.valid.n)
        observed["vllm:request_params_max_tokens"].observe(sampling.max_tokens)

    def collect(self) -> Iterator[Metric]:
        for name, (help_text, _) in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(name, help_text, labels=LABELS)
            for model, observed in self._histograms.items():
                kept = observed[name]
                histogram.add_metric((model, ENGINE), kept.cumulative, kept.total)
            yield histogram
        for name, help_text in _COUNTERS.items():
            counter = CounterMetricFamily(name, help_text, labels=LABELS)
            for (counted, model), value in self._counters.items():
                if counted == name:
                    counter.add_metric((model, ENGINE), value)
            yield counter
        ended = CounterMetricFamily("vllm:request_success", "Choices that ended.", labels=(*LABELS, "finished_reason"))
        for (model, reason), value in self._ended.items():
            ended.add_metric((model, ENGINE, reason), value)
        yield ended
        yield from self._running_counts()
        attempts = CounterMetricFamily("baton:attempts_failed", "Attempts that failed.", labels=("reason",))
        for name, value in self._attempts_failed.items():
            attempts.add_metric((name,), value)
        yield attempts

    def _running_counts(self) -> Iterator[Metric]:
        """Of requests that run too."""
        counts = self._counts
        for name, help_text, tokens in (
            ("vllm:prompt_tokens", "Tokens of prompts that workers were given.", counts.prompt_tokens),
            ("vllm:generation_tokens", "Tokens of answers, as they go out.", counts.generated_tokens),
        ):
            counter = CounterMetricFamily(name, help_text, labels=LABELS)
            for model, value in tokens.items():
                counter.add_metric((model, ENGINE), value)
            yield counter
        yield CounterMetricFamily("baton:requests_started", "Requests that came.", value=counts.started)
        help_text = "Requests that ended: answered, cancelled, refused before a worker was given them, or failed."
        ended = CounterMetricFamily("baton:requests_ended", help_text, labels=("outcome", "reason"))
        for (outcome, reason), value in counts.ended.items():
            ended.add_metric((outcome.value, reason), value)
        yield ended

    def _of(self, model: str) -> dict[str, Histogram]:
        if model not in self._histograms:
            self._histograms[model] = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        return self._histograms[model]


def _durations(measured: Stages) -> dict[str, float]:
    """In seconds, by the name of the histogram."""
    waited_ms = measured.router_queue_ms + measured.route_ms + measured.prefill_queue_ms
    return {
        "vllm:e2e_request_latency_seconds": measured.total_ms / 1e3,
        "vllm:request_queue_time_seconds": waited_ms / 1e3,
        "vllm:request_prefill_time_seconds": measured.prefill_ms / 1e3,
        "vllm:request_inference_time_seconds": max(0.0, measured.total_ms - waited_ms) / 1e3,
        "baton:kv_transfer_exposed_seconds": measured.transfer_exposed_ms / 1e3,
    }


Reading = Callable[[WorkerDescription, WorkerReport], float]

_WORKER_GAUGES: dict[str, tuple[str, Reading]] = {
    "vllm:num_requests_running": ("Sequences in the batch.", lambda worker, report: report.running_sequences),
    "vllm:num_requests_waiting": ("Requests that wait in the worker.", lambda worker, report: report.waiting_requests),
    "vllm:kv_cache_usage_perc": ("Share of KV blocks that are held.", lambda worker, report: _held(report)),
    "vllm:gpu_cache_usage_perc": ("The same, by its older name.", lambda worker, report: _held(report)),
    "baton:pending_tokens": ("Prompt tokens to be computed.", lambda worker, report: report.pending_tokens),
}
_WORKER_COUNTERS: dict[str, tuple[str, Reading]] = {
    "vllm:prefix_cache_queries": ("Tokens looked up.", lambda worker, report: report.cache_query_tokens),
    "vllm:prefix_cache_hits": ("Tokens found.", lambda worker, report: report.cache_hit_tokens),
    "baton:kv_blocks_checked": (
        "Blocks read whose checksum was compared.",
        lambda worker, report: report.checked_blocks,
    ),
    "baton:kv_checksum_mismatches": ("Of those, corrupt ones.", lambda worker, report: report.checksum_mismatches),
    "baton:steps": ("Steps of the engine.", lambda worker, report: report.steps),
    "vllm:num_preemptions": ("Sequences that had to wait for pages.", lambda worker, report: report.preemptions),
}
_DEPARTURES = {
    "deaths": "Processes found gone that had not drained.",
    "drains": "Processes that ended after they had drained.",
    "role_changes": "Changes between prefill and decode; the process lives on.",
    "lost_sessions": "Sessions lost for another reason: silence, or a connection that did not come back in time.",
}
_PAGE_STATES = ("free", "cached", "held_by_sequences", "held_by_transfers")


@dataclass(frozen=True, slots=True)
class ClusterMetrics(Collector):
    cluster: Cluster
    queue: AdmissionQueue
    readiness: Readiness
    dispatcher: Dispatcher
    connections: Callable[[], int]
    registry_connected: Callable[[], bool]

    def collect(self) -> Iterator[Metric]:
        reporting = [
            (worker.description, worker.report)
            for worker in self.cluster.workers
            if worker.connected and worker.description is not None and worker.report is not None
        ]
        for name, (help_text, read) in _WORKER_GAUGES.items():
            gauge = GaugeMetricFamily(name, help_text, labels=LABELS)
            for description, report in reporting:
                gauge.add_metric((description.model.name, description.worker_id), read(description, report))
            yield gauge
        for name, (help_text, read) in _WORKER_COUNTERS.items():
            counter = CounterMetricFamily(name, help_text, labels=LABELS)
            for description, report in reporting:
                counter.add_metric((description.model.name, description.worker_id), read(description, report))
            yield counter
        pages = GaugeMetricFamily("baton:kv_blocks", "KV blocks, by what they are.", labels=(*LABELS, "state"))
        links = GaugeMetricFamily("baton:link_gb_per_s", "Measured when two met.", labels=("engine", "to", "transport"))
        cache = GaugeMetricFamily("vllm:cache_config_info", "", labels=(*LABELS, "block_size", "num_gpu_blocks"))
        for description, report in reporting:
            model, worker = description.model.name, description.worker_id
            for state in _PAGE_STATES:
                pages.add_metric((model, worker, state), getattr(report.pages, state))
            for link in report.links:
                links.add_metric((worker, link.endpoint, link.transport), link.gb_per_s)
            cache.add_metric((model, worker, str(description.model.block_tokens), str(description.total_blocks)), 1)
        yield from (pages, links, cache)
        yield from self._departures()
        yield from self._own()

    def _departures(self) -> Iterator[Metric]:
        for name, help_text in _DEPARTURES.items():
            counter = CounterMetricFamily(f"baton:worker_{name}", help_text, labels=("engine",))
            for worker, departures in self.cluster.departures.items():
                counter.add_metric((worker,), getattr(departures, name))
            yield counter

    def _own(self) -> Iterator[Metric]:
        for name, help_text, value in (
            ("baton:active_requests", "Accepted and not yet ended.", self.dispatcher.active),
            ("baton:queued_requests", "Waiting in the router for room.", self.queue.waiting),
            ("baton:ready", "1 where the last readiness probe came back.", int(self.readiness.ready)),
            ("baton:http_connections", "Open now.", self.connections()),
            ("baton:registry_connected", "0 where Redis does not answer.", int(self.registry_connected())),
        ):
            yield GaugeMetricFamily(name, help_text, value=value)


def _held(report: WorkerReport) -> float:
    return report.pages.held / report.pages.total if report.pages.total else 0.0


@dataclass(frozen=True, slots=True)
class StreamMetrics(Collector):
    """`journal` None: there is no Redis, and nothing is written."""

    streams: Streams
    journal: Journal | None

    def collect(self) -> Iterator[Metric]:
        resumed = "Streams that a client resumed here, after its router or its connection was gone."
        yield CounterMetricFamily("baton:client_resumes", resumed, value=self.streams.resumed)
        if self.journal is None:
            return
        counts = CounterMetricFamily("baton:journal_records", "By what became of writing them.", labels=("outcome",))
        for outcome, count in asdict(self.journal.counts).items():
            counts.add_metric((outcome,), count)
        yield counts
