"""Collectors of /metrics: requests over HTTP and gRPC, workers, resumed streams, and stalls.

Requests and tokens are counted as they occur, other values of a request once it has finished; values of workers are
read at each scrape. All names are declared in `metric_families.py`. Only the OpenMetrics format has exemplars: traces
of the newest values.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from baton.router.admission.queue import AdmissionQueue
from baton.router.dispatcher import Dispatcher, RequestCounts
from baton.router.http import metric_families as declared
from baton.router.http.metric_families import TracedHistogram, TraceLink
from baton.router.placement.cluster import Cluster, Departures
from baton.router.readiness import Readiness
from baton.router.request.journal import Journal, Streams
from baton.router.trace.record import RequestOutcome, RequestRecord, stages
from baton.router.types.events import FailureReason
from baton.router.types.request import Operation
from baton.router.types.response import Stages
from baton.router.types.worker import WorkerRole
from baton.text.causes import StallCause
from baton.versions import OWN, UNANNOUNCED_RELEASE

ENGINE = "router"
COUNTED_FAILURES = (
    "worker_lost", "transfer_failed", "poison", "nonfinite_logits", "worker_failed", "no_workers",
    "deadline_exceeded", "unexpected",
)  # fmt: skip
"""Reasons of failed requests whose counters are exposed as zeros from the start: in a series that begins at 1,
Prometheus would miss the first failure.
"""


class ModelMetrics(NamedTuple):
    """Histograms and counters for the requests of one model, by name of the metric."""

    histograms: Mapping[str, TracedHistogram]
    counters: Mapping[str, prometheus_client.Counter]


class RequestMetrics(Collector):
    """Collector of metrics of requests. Call `observe` with every finished request.

    `counts`: counts that include running requests.
    """

    def __init__(self, counts: RequestCounts) -> None:
        self._counts = counts
        self._histograms = {family.name: family.histogram() for family in declared.REQUEST_HISTOGRAMS}
        self._counters = {family.name: family.counter() for family in declared.REQUEST_COUNTERS}
        self._choices = declared.CHOICES_ENDED.counter()
        self._attempts_failed = declared.ATTEMPTS_FAILED.counter()
        self._models: dict[str, ModelMetrics] = {}
        for reason in FailureReason:
            self._attempts_failed.labels(reason.name.lower())

    def observe(self, record: RequestRecord) -> None:
        self._observe_attempts(record)
        self._observe_choices(record)
        timeline, link = record.timeline, trace_link(record)
        if record.operation is Operation.EMBED:
            self._of(record.model).histograms["vllm:request_prompt_tokens"].observe_all([record.prompt_tokens], link)
            return
        measured = stages(timeline, timeline.ended_s or timeline.arrived_s)
        values: dict[str, list[float]] = {}
        if timeline.first_token_s is not None:  # including cancelled requests, which may be the slow ones
            values["vllm:time_to_first_token_seconds"] = [measured.ttft_ms / 1e3]
            values["vllm:inter_token_latency_seconds"] = [gap_ms / 1e3 for gap_ms in timeline.gaps.each_ms]
        if record.summary is not None and record.prepared is not None:
            usage, choices = record.summary.usage, record.prepared.n
            values |= {name: [seconds] for name, seconds in _durations(measured).items()}
            later_tokens = usage.completion_tokens - choices
            if timeline.first_token_s is not None and timeline.last_token_s is not None and later_tokens > 0:
                decode_s = timeline.last_token_s - timeline.first_token_s
                values["vllm:request_decode_time_seconds"] = [decode_s]
                values["vllm:request_time_per_output_token_seconds"] = [decode_s * choices / later_tokens]
            values["vllm:request_prompt_tokens"] = [usage.prompt_tokens]
            values["vllm:request_generation_tokens"] = [usage.completion_tokens]
            values["vllm:request_params_n"] = [choices]
            values["vllm:request_params_max_tokens"] = [record.prepared.sampling.max_tokens]
        for name, observed in values.items():
            self._of(record.model).histograms[name].observe_all(observed, link)

    def _observe_attempts(self, record: RequestRecord) -> None:
        timeline = record.timeline
        if not timeline.notes and not timeline.resumes:
            return
        histograms, counters = self._of(record.model)
        for note in timeline.notes:
            placed = note.placement
            in_pool = placed.decode_hit_tokens if placed.prefill is None else placed.prefill_hit_tokens
            counters["baton:placed_pool_tokens"].inc(in_pool)
            counters["baton:placed_file_tokens"].inc(placed.loaded_tokens)
            if note.kv_received is not None:
                counters["baton:kv_transfer_bytes"].inc(note.kv_received.transferred_bytes)
            if note.failed is not None:
                self._attempts_failed.labels(note.failed.reason.name.lower()).inc()
        if timeline.prefill is not None:
            counters["vllm:prompt_tokens_cached"].inc(timeline.prefill.cached_tokens)
            counters["baton:restored_tokens"].inc(timeline.prefill.restored_tokens)
        if timeline.resumes:
            counters["baton:streams_resumed"].inc()
            gaps_s = [resume.gap_ms / 1e3 for resume in timeline.resumes]
            histograms["baton:resume_gap_seconds"].observe_all(gaps_s, trace_link(record))

    def _observe_choices(self, record: RequestRecord) -> None:
        for reason in record.finish_reasons:
            self._choices.labels(record.model, ENGINE, reason).inc()
        if record.end is not None and record.end.outcome is RequestOutcome.CANCELLED:
            choices = record.prepared.n if record.prepared is not None else 1
            self._choices.labels(record.model, ENGINE, "abort").inc(choices - len(record.finish_reasons))

    def collect(self) -> Iterator[Metric]:
        for metric in (*self._histograms.values(), *self._counters.values(), self._choices, self._attempts_failed):
            yield from metric.collect()
        counts = self._counts
        yield declared.PROMPT_TOKENS.filled({(model, ENGINE): count for model, count in counts.prompt_tokens.items()})
        generated = counts.generated_tokens
        yield declared.GENERATED_TOKENS.filled({(model, ENGINE): count for model, count in generated.items()})
        yield declared.REQUESTS_STARTED.filled({(): counts.started})
        ended = {(RequestOutcome.FAILED, reason): 0 for reason in COUNTED_FAILURES} | dict(counts.ended)
        yield declared.REQUESTS_ENDED.filled({(end.value, reason): count for (end, reason), count in ended.items()})

    def _of(self, model: str) -> ModelMetrics:
        """Return the metrics of the model. The first call creates all of them."""
        if model not in self._models:
            self._models[model] = ModelMetrics(
                {name: histogram.labels(model, ENGINE) for name, histogram in self._histograms.items()},
                {name: counter.labels(model, ENGINE) for name, counter in self._counters.items()},
            )
        return self._models[model]


def trace_link(record: RequestRecord) -> TraceLink | None:
    """Return the link to a request's trace; None if the trace is not sampled."""
    if not record.identity.sampled:
        return None
    timeline = record.timeline
    newest_s = timeline.ended_s or timeline.last_token_s or timeline.arrived_s
    return TraceLink(record.identity.trace_id, record.clock.at(newest_s) / 1e9)


def _durations(measured: Stages) -> dict[str, float]:
    """Return durations of a request in seconds, by name of the histogram that observes them."""
    waited_ms = measured.router_queue_ms + measured.route_ms + measured.prefill_queue_ms
    return {
        "vllm:e2e_request_latency_seconds": measured.total_ms / 1e3,
        "vllm:request_queue_time_seconds": waited_ms / 1e3,
        "vllm:request_prefill_time_seconds": measured.prefill_ms / 1e3,
        "vllm:request_inference_time_seconds": max(0.0, measured.total_ms - waited_ms) / 1e3,
        "baton:kv_transfer_exposed_seconds": measured.transfer_exposed_ms / 1e3,
    }


@dataclass(frozen=True, slots=True)
class ClusterMetrics(Collector):
    """Collector of the state of workers and of this router, which is read at each scrape."""

    cluster: Cluster
    queue: AdmissionQueue
    readiness: Readiness
    dispatcher: Dispatcher
    connections: Callable[[], int]
    without_room: Callable[[], Mapping[str, int]]
    registry_connected: Callable[[], bool]
    desired: Callable[[], Mapping[WorkerRole, int]]

    def collect(self) -> Iterator[Metric]:
        yield from self._worker_reports()
        yield from self._departures()
        yield from self._own()
        connected = [worker for worker in self.cluster.workers if worker.connected]
        roles = Counter(worker.role for worker in connected)
        yield declared.WORKERS.filled({(role.value,): roles[role] for role in WorkerRole})
        yield declared.DESIRED_REPLICAS.filled({(role.value,): count for role, count in self.desired().items()})
        described = [worker.description for worker in connected if worker.description is not None]
        releases = [(ENGINE, OWN), *((each.worker_id, each.versions) for each in described)]
        yield declared.BUILD_INFO.filled(
            {(name, each.release or UNANNOUNCED_RELEASE, str(each.protocol)): 1 for name, each in releases}
        )

    def _worker_reports(self) -> Iterator[Metric]:
        reporting = [
            (worker.description, worker.report)
            for worker in self.cluster.workers
            if worker.connected and worker.description is not None and worker.report is not None
        ]
        for family, read in declared.WORKER_METRICS:
            values = dict[tuple[str, ...], float]()
            for worker, report in reporting:
                labels = {"model_name": worker.model.name, "engine": worker.worker_id}
                own = tuple(value for label, value in labels.items() if label in family.labels)
                values |= {(*own, *further): value for further, value in read(worker, report).items()}
            yield family.filled(values)
        known: dict[tuple[str, ...], float] = {
            (worker.description.model.name, worker.description.worker_id): files.folder_blocks
            for worker in self.cluster.workers
            if worker.description is not None and (files := self.cluster.tiers.known(worker.endpoint)) is not None
        }
        yield declared.TIER_KNOWN.filled(known)

    def _departures(self) -> Iterator[Metric]:
        """Yield counts of departures for every worker seen so far. Zeros let Prometheus see the first increase."""
        present = (each.description.worker_id for each in self.cluster.workers if each.description is not None)
        departures = dict.fromkeys(present, Departures()) | dict(self.cluster.departures)
        for name, counter in declared.DEPARTURES.items():
            yield counter.filled({(worker,): getattr(counts, name) for worker, counts in departures.items()})

    def _own(self) -> Iterator[Metric]:
        for gauge, value in (
            (declared.ACTIVE_REQUESTS, self.dispatcher.active),
            (declared.QUEUED_REQUESTS, self.queue.waiting),
            (declared.READY, int(self.readiness.ready)),
            (declared.REFUSED_WORKERS, len(self.readiness.refused)),
            (declared.HTTP_CONNECTIONS, self.connections()),
            (declared.REGISTRY_CONNECTED, int(self.registry_connected())),
        ):
            yield gauge.filled({(): value})
        yield declared.HTTP_WITHOUT_ROOM.filled({(reason,): count for reason, count in self.without_room().items()})
        served = self.readiness.gate.served
        readers = {} if served is None else {(served.name, ENGINE): served.tokenizer.reader}
        yield declared.TOKENS_READ.filled({labels: reader.read_tokens for labels, reader in readers.items()})
        yield declared.TOKENS_KNOWN.filled({labels: reader.known_tokens for labels, reader in readers.items()})


@dataclass(frozen=True, slots=True)
class StreamMetrics(Collector):
    """Collector of metrics of resumed streams and of the journal. `journal`: None without Redis."""

    streams: Streams
    journal: Journal | None

    def collect(self) -> Iterator[Metric]:
        yield declared.CLIENT_RESUMES.filled({(): self.streams.resumed})
        if self.journal is not None:
            counts = asdict(self.journal.counts)
            yield declared.JOURNAL_RECORDS.filled({(outcome,): count for outcome, count in counts.items()})


class StallMetrics(Collector):
    """Collector of metrics of stalls, by cause. Call `observe` with every finished request."""

    def __init__(self, loop_busy_s: Callable[[], float]) -> None:
        """Create the metrics. `loop_busy_s` returns the total time for which the router's event loop was blocked."""
        self._loop_busy_s = loop_busy_s
        self._stalls, self._seconds = declared.STALLS.counter(), declared.STALL_SECONDS.counter()
        # All causes start at zero: in a series that begins at 1, Prometheus would miss the first stall.
        for cause in StallCause:
            self._stalls.labels(cause.value)
            self._seconds.labels(cause.value)

    def observe(self, record: RequestRecord) -> None:
        for stall in record.gaps.stalls if record.gaps is not None else ():
            self._stalls.labels((stall.causes[0].cause if stall.causes else StallCause.UNKNOWN).value).inc()
            for part in stall.causes:
                self._seconds.labels(part.cause.value).inc(part.ms / 1e3)

    def collect(self) -> Iterator[Metric]:
        yield from self._stalls.collect()
        yield from self._seconds.collect()
        yield declared.LOOP_BUSY.filled({(): self._loop_busy_s()})


class Exposition(NamedTuple):
    body: bytes
    media_type: str


_OPENMETRICS = "application/openmetrics-text"
METRIC_FORMATS = (CONTENT_TYPE_PLAIN_0_0_4, openmetrics.CONTENT_TYPE_LATEST)
"""Media types of /metrics."""


def exposition(registry: CollectorRegistry, accept: str) -> Exposition:
    """Return the metrics in the format that `accept` (the header) prefers: OpenMetrics or Prometheus' text."""
    weighed = [_weighed(accepted) for accepted in accept.split(",")]
    wanted, plain = (
        max((weight for name, weight in weighed if name == wanted), default=0.0)
        for wanted in (_OPENMETRICS, "text/plain")
    )
    if wanted > 0.0 and wanted >= plain:
        # Any other escaping would replace the colons in our names, and names would differ between the formats.
        text = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)
        return Exposition(text, openmetrics.CONTENT_TYPE_LATEST)
    return Exposition(generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4)


def _weighed(accepted: str) -> tuple[str, float]:
    """Parse an entry of an `Accept` header into media type and weight. Weight 1 by default, 0 if malformed."""
    media_type, *parameters = (part.strip().lower() for part in accepted.split(";"))
    weight = next((part.removeprefix("q=") for part in parameters if part.startswith("q=")), "1")
    try:
        return media_type, float(weight)
    except ValueError:
        return media_type, 0.0
