"""/metrics: of this router's requests, over HTTP and gRPC alike, of the workers, and of resumed streams.

Requests and tokens are counted as they happen, the rest once each has ended; workers are read at the moment of the
scrape. `metric_families.py` declares all names. A scraper that asks for OpenMetrics is given the traces of the newest
values too (exemplars), for which the older text has no place.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from baton.router.admission.queue import AdmissionQueue
from baton.router.dispatcher import Dispatcher, RequestCounts
from baton.router.http import metric_families as declared
from baton.router.http.metric_families import Histogram, TraceLink
from baton.router.placement.cluster import Cluster, Departures
from baton.router.readiness import Readiness
from baton.router.request.journal import Journal, Streams
from baton.router.trace.record import Outcome, RequestRecord, stages
from baton.router.types.events import FailureReason
from baton.router.types.request import Operation
from baton.router.types.response import Stages
from baton.router.types.worker import SessionReport, TierReport, WorkerDescription, WorkerReport, WorkerRole
from baton.text.causes import StallCause
from baton.versions import OWN, UNANNOUNCED_RELEASE

ENGINE = "router"
COUNTED_FAILURES = (
    "worker_lost", "transfer_failed", "poison", "nonfinite_logits", "worker_failed", "no_workers",
    "deadline_exceeded", "unexpected",
)  # fmt: skip
"""Reasons of failed requests that are shown from the start: the growth of a series that begins at 1 is unknown."""


class RequestMetrics(Collector):
    """`observe` is called with every request that has ended; `counts` has those that run too."""

    def __init__(self, counts: RequestCounts) -> None:
        self._counts = counts
        self._histograms: dict[str, dict[str, Histogram]] = {}  # by model, by name
        self._counters: Counter[tuple[str, str]] = Counter()  # by name and model
        self._ended: Counter[tuple[str, str]] = Counter()  # by model and reason
        self._attempts_failed = Counter({reason.name.lower(): 0 for reason in FailureReason})

    def observe(self, record: RequestRecord) -> None:
        model, summary, timeline = record.model, record.summary, record.timeline
        link = trace_link(record)
        self._attempts_failed.update(note.failed.reason.name.lower() for note in timeline.notes if note.failed)
        if timeline.resumes:
            self._counters["baton:streams_resumed", model] += 1
            gaps_s = [resume.gap_ms / 1e3 for resume in timeline.resumes]
            self._of(model)["baton:resume_gap_seconds"].observe_all(gaps_s, link)
        for reason in record.finish_reasons:
            self._ended[model, reason] += 1
        if record.end is not None and record.end.outcome is Outcome.CANCELLED:
            choices = record.prepared.valid.n if record.prepared is not None else 1
            self._ended[model, "abort"] += choices - len(record.finish_reasons)
        for note in timeline.notes:
            placed = note.placement
            in_pool = placed.decode_hit_tokens if placed.prefill is None else placed.prefill_hit_tokens
            self._counters["baton:placed_pool_tokens", model] += in_pool
            self._counters["baton:placed_file_tokens", model] += placed.loaded_tokens
        if timeline.prefill is not None:
            self._counters["vllm:prompt_tokens_cached", model] += timeline.prefill.cached_tokens
            self._counters["baton:restored_tokens", model] += timeline.prefill.restored_tokens
        if received := [note.kv_received for note in timeline.notes if note.kv_received is not None]:
            self._counters["baton:kv_transfer_bytes", model] += sum(each.transferred_bytes for each in received)
        measured = stages(timeline, timeline.ended_s or timeline.arrived_s)
        if record.operation is Operation.EMBED:  # no token was waited for
            self._of(model)["vllm:request_prompt_tokens"].observe(record.prompt_tokens, link)
            return
        if timeline.first_token_s is not None:  # also of those that were cancelled: they may be the slow ones
            observed = self._of(model)
            observed["vllm:time_to_first_token_seconds"].observe(measured.ttft_ms / 1e3, link)
            gaps_s = [gap_ms / 1e3 for gap_ms in timeline.gaps.each_ms]
            observed["vllm:inter_token_latency_seconds"].observe_all(gaps_s, link)
        if summary is None or record.prepared is None:
            return
        observed = self._of(model)
        usage, sampling = summary.usage, record.prepared.sampling
        for name, value in _durations(measured).items():
            observed[name].observe(value, link)
        later = usage.completion_tokens - record.prepared.valid.n
        if timeline.first_token_s is not None and timeline.last_token_s is not None and later > 0:
            spent_s = timeline.last_token_s - timeline.first_token_s
            per_token_s = spent_s * record.prepared.valid.n / later
            observed["vllm:request_decode_time_seconds"].observe(spent_s, link)
            observed["vllm:request_time_per_output_token_seconds"].observe(per_token_s, link)
        observed["vllm:request_prompt_tokens"].observe(usage.prompt_tokens, link)
        observed["vllm:request_generation_tokens"].observe(usage.completion_tokens, link)
        observed["vllm:request_params_n"].observe(record.prepared.valid.n, link)
        observed["vllm:request_params_max_tokens"].observe(sampling.max_tokens, link)

    def collect(self) -> Iterator[Metric]:
        for histogram in declared.REQUEST_HISTOGRAMS:
            family = histogram.empty()
            for model, observed in self._histograms.items():
                kept = observed[histogram.name]
                family.add_metric((model, ENGINE), kept.cumulative, kept.total)
            yield family
        for counter in declared.REQUEST_COUNTERS:
            counted = counter.empty()
            for model in self._histograms:
                counted.add_metric((model, ENGINE), self._counters[counter.name, model])
            yield counted
        ended = declared.CHOICES_ENDED.empty()
        for (model, reason), value in self._ended.items():
            ended.add_metric((model, ENGINE, reason), value)
        yield ended
        yield from self._running_counts()
        attempts = declared.ATTEMPTS_FAILED.empty()
        for name, value in self._attempts_failed.items():
            attempts.add_metric((name,), value)
        yield attempts

    def _running_counts(self) -> Iterator[Metric]:
        """Of requests that run too."""
        counts = self._counts
        for declaration, tokens in (
            (declared.PROMPT_TOKENS, counts.prompt_tokens),
            (declared.GENERATED_TOKENS, counts.generated_tokens),
        ):
            counter = declaration.empty()
            for model, value in tokens.items():
                counter.add_metric((model, ENGINE), value)
            yield counter
        started = declared.REQUESTS_STARTED.empty()
        started.add_metric((), counts.started)
        yield started
        ended = declared.REQUESTS_ENDED.empty()
        expected = {(Outcome.FAILED, reason): 0 for reason in COUNTED_FAILURES}
        for (outcome, reason), ended_requests in (expected | dict(counts.ended)).items():
            ended.add_metric((outcome.value, reason), ended_requests)
        yield ended

    def _of(self, model: str) -> dict[str, Histogram]:
        if model not in self._histograms:
            self._histograms[model] = {each.name: Histogram(each.bounds) for each in declared.REQUEST_HISTOGRAMS}
        return self._histograms[model]


def trace_link(record: RequestRecord) -> TraceLink | None:
    """None for a request whose caller keeps no trace of it."""
    if not record.identity.sampled:
        return None
    timeline = record.timeline
    newest_s = timeline.ended_s or timeline.last_token_s or timeline.arrived_s
    return TraceLink(record.identity.trace_id, record.clock.at(newest_s) / 1e9)


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

_READINGS: Mapping[str, Reading] = {
    "vllm:num_requests_running": lambda worker, report: report.running_sequences,
    "vllm:num_requests_waiting": lambda worker, report: report.waiting_requests,
    "vllm:kv_cache_usage_perc": lambda worker, report: _held(report),
    "vllm:gpu_cache_usage_perc": lambda worker, report: _held(report),
    "baton:pending_tokens": lambda worker, report: report.pending_tokens,
    "vllm:prefix_cache_queries": lambda worker, report: report.cache_query_tokens,
    "vllm:prefix_cache_hits": lambda worker, report: report.cache_hit_tokens,
    "baton:kv_blocks_checked": lambda worker, report: report.checked_blocks,
    "baton:kv_checksum_mismatches": lambda worker, report: report.checksum_mismatches,
    "baton:kv_at_rest_checked_blocks": lambda worker, report: report.checked_at_rest_blocks,
    "baton:kv_at_rest_corrupt_blocks": lambda worker, report: report.corrupt_at_rest_blocks,
    "baton:steps": lambda worker, report: report.steps,
    "vllm:num_preemptions": lambda worker, report: report.preemptions,
    "vllm:spec_decode_num_drafts": lambda worker, report: report.drafts,
    "vllm:spec_decode_num_draft_tokens": lambda worker, report: report.drafted_tokens,
    "vllm:spec_decode_num_accepted_tokens": lambda worker, report: sum(report.accepted_tokens),
    "baton:spec_decode_gained_seconds": lambda worker, report: report.drafts_gained_s,
    "baton:spec_decode_lost_seconds": lambda worker, report: report.drafts_lost_s,
}
_TIER_READINGS: Mapping[str, Callable[[TierReport], float]] = {
    "baton:kv_tier_blocks": lambda tier: tier.blocks,
    "baton:kv_tier_bytes": lambda tier: tier.size_bytes,
    "baton:kv_tier_memory_blocks": lambda tier: tier.memory_blocks,
    "baton:kv_tier_memory_bytes": lambda tier: tier.memory_bytes,
    "baton:kv_tier_reads": lambda tier: tier.reads,
    "baton:kv_tier_writes": lambda tier: tier.writes,
    "baton:kv_tier_queries": lambda tier: tier.queried_blocks,
    "baton:kv_tier_hits": lambda tier: tier.hit_blocks,
    "baton:kv_tier_corrupt_blocks": lambda tier: tier.corrupt_blocks,
    "baton:kv_tier_loaded_bytes": lambda tier: tier.loaded_bytes,
    "baton:kv_tier_stored_bytes": lambda tier: tier.stored_bytes,
    "baton:kv_tier_dropped_blocks": lambda tier: tier.dropped_blocks,
    "baton:kv_tier_evicted_blocks": lambda tier: tier.evicted_blocks,
}
"""Of workers that have files below their pool."""
_SESSION_READINGS: Mapping[str, Callable[[SessionReport], float]] = {
    "baton:kv_sessions": lambda sessions: sessions.known,
    "baton:kv_protected_blocks": lambda sessions: sessions.protected_blocks,
    "baton:kv_prefetched_blocks": lambda sessions: sessions.prefetched_blocks,
    "baton:kv_prefetched_used_blocks": lambda sessions: sessions.prefetched_used_blocks,
    "baton:kv_taken_over_blocks": lambda sessions: sessions.taken_over_blocks,
}
_EVICTED: Mapping[str, Callable[[SessionReport], float]] = {
    "done": lambda sessions: sessions.evicted_done_blocks,
    "other": lambda sessions: sessions.evicted_other_blocks,
    "protected": lambda sessions: sessions.evicted_protected_blocks,
}
_PAGE_STATES = ("free", "cached", "held_by_sequences", "held_by_transfers")


@dataclass(frozen=True, slots=True)
class ClusterMetrics(Collector):
    cluster: Cluster
    queue: AdmissionQueue
    readiness: Readiness
    dispatcher: Dispatcher
    connections: Callable[[], int]
    without_room: Callable[[], Mapping[str, int]]
    registry_connected: Callable[[], bool]
    desired: Callable[[], Mapping[WorkerRole, int]]

    def collect(self) -> Iterator[Metric]:
        reporting = [
            (worker.description, worker.report)
            for worker in self.cluster.workers
            if worker.connected and worker.description is not None and worker.report is not None
        ]
        for read in (*declared.WORKER_GAUGES, *declared.WORKER_COUNTERS):
            family = read.empty()
            for description, report in reporting:
                value = _READINGS[read.name](description, report)
                family.add_metric((description.model.name, description.worker_id), value)
            yield family
        for of_tier in declared.TIER:
            family = of_tier.empty()
            for description, report in reporting:
                if report.tier is not None:
                    labels = (description.model.name, description.worker_id)
                    family.add_metric(labels, float(_TIER_READINGS[of_tier.name](report.tier)))
            yield family
        yield self._known_files()
        for of_sessions in declared.SESSIONS:
            family = of_sessions.empty()
            for description, report in reporting:
                labels = (description.model.name, description.worker_id)
                family.add_metric(labels, float(_SESSION_READINGS[of_sessions.name](report.sessions)))
            yield family
        evicted = declared.EVICTED_BLOCKS.empty()
        for description, report in reporting:
            for kind, blocks in _EVICTED.items():
                evicted.add_metric((description.model.name, description.worker_id, kind), blocks(report.sessions))
        yield evicted
        pages, links, cache = declared.KV_BLOCKS.empty(), declared.LINKS.empty(), declared.CACHE_CONFIG.empty()
        accepted = declared.ACCEPTED_BY_POSITION.empty()
        for description, report in reporting:
            model, worker = description.model.name, description.worker_id
            for state in _PAGE_STATES:
                pages.add_metric((model, worker, state), getattr(report.pages, state))
            for link in report.links:
                links.add_metric((worker, link.endpoint, link.transport), link.gb_per_s)
            cache.add_metric((model, worker, str(description.model.block_tokens), str(description.total_blocks)), 1)
            for position, tokens in enumerate(report.accepted_tokens or (0,)):
                accepted.add_metric((model, worker, str(position)), tokens)
        yield from (pages, links, cache, accepted)
        yield self._workers()
        yield self._releases()
        yield self._desired()
        yield from self._departures()
        yield from self._own()
        yield from self._prompts()

    def _known_files(self) -> Metric:
        family = declared.TIER_KNOWN.empty()
        for worker in self.cluster.workers:
            known = self.cluster.tiers.known(worker.endpoint)
            if known is not None and worker.description is not None:
                labels = (worker.description.model.name, worker.description.worker_id)
                family.add_metric(labels, known.folder_blocks)
        return family

    def _workers(self) -> Metric:
        """Both roles are there from the start, so that a role without workers is 0."""
        roles = Counter(worker.role for worker in self.cluster.workers if worker.connected)
        family = declared.WORKERS.empty()
        for role in WorkerRole:
            family.add_metric((role.value,), roles[role])
        return family

    def _releases(self) -> Metric:
        family = declared.BUILD_INFO.empty()
        connected = [worker.description for worker in self.cluster.workers if worker.connected and worker.description]
        for name, versions in ((ENGINE, OWN), *((each.worker_id, each.versions) for each in connected)):
            family.add_metric((name, versions.release or UNANNOUNCED_RELEASE, str(versions.protocol)), 1)
        return family

    def _desired(self) -> Metric:
        family = declared.DESIRED_REPLICAS.empty()
        for role, workers in self.desired().items():
            family.add_metric((role.value,), workers)
        return family

    def _departures(self) -> Iterator[Metric]:
        """Of each worker that has been there, also 0: the growth of a series that begins at 1 is unknown."""
        present = (each.description.worker_id for each in self.cluster.workers if each.description is not None)
        departures = dict.fromkeys(present, Departures()) | dict(self.cluster.departures)
        for name, counter in declared.DEPARTURES.items():
            family = counter.empty()
            for worker, counts in departures.items():
                family.add_metric((worker,), getattr(counts, name))
            yield family

    def _own(self) -> Iterator[Metric]:
        for gauge, value in (
            (declared.ACTIVE_REQUESTS, self.dispatcher.active),
            (declared.QUEUED_REQUESTS, self.queue.waiting),
            (declared.READY, int(self.readiness.ready)),
            (declared.REFUSED_WORKERS, len(self.readiness.refused)),
            (declared.HTTP_CONNECTIONS, self.connections()),
            (declared.REGISTRY_CONNECTED, int(self.registry_connected())),
        ):
            family = gauge.empty()
            family.add_metric((), value)
            yield family
        without_room = declared.HTTP_WITHOUT_ROOM.empty()
        for reason, count in self.without_room().items():
            without_room.add_metric((reason,), count)
        yield without_room

    def _prompts(self) -> Iterator[Metric]:
        """Since the model is served."""
        read, known = declared.TOKENS_READ.empty(), declared.TOKENS_KNOWN.empty()
        served = self.readiness.gate.served
        if served is not None:
            read.add_metric((served.name, ENGINE), served.tokenizer.reader.read_tokens)
            known.add_metric((served.name, ENGINE), served.tokenizer.reader.known_tokens)
        yield from (read, known)


def _held(report: WorkerReport) -> float:
    return report.pages.held / report.pages.total if report.pages.total else 0.0


@dataclass(frozen=True, slots=True)
class StreamMetrics(Collector):
    """`journal` None: there is no Redis, and nothing is written."""

    streams: Streams
    journal: Journal | None

    def collect(self) -> Iterator[Metric]:
        resumed = declared.CLIENT_RESUMES.empty()
        resumed.add_metric((), self.streams.resumed)
        yield resumed
        if self.journal is None:
            return
        counts = declared.JOURNAL_RECORDS.empty()
        for outcome, count in asdict(self.journal.counts).items():
            counts.add_metric((outcome,), count)
        yield counts


class StallMetrics(Collector):
    """Stalls of answers that have ended, by cause. `observe` is called with every request that has ended."""

    def __init__(self, loop_busy_s: Callable[[], float]) -> None:
        """`loop_busy_s`: of the router's event loop, so far."""
        self._loop_busy_s = loop_busy_s
        self._stalls = Counter(dict.fromkeys(StallCause, 0))  # all from the start: see COUNTED_FAILURES
        self._seconds = dict.fromkeys(StallCause, 0.0)

    def observe(self, record: RequestRecord) -> None:
        for stall in record.gaps.stalls if record.gaps is not None else ():
            self._stalls[stall.causes[0].cause if stall.causes else StallCause.UNKNOWN] += 1
            for part in stall.causes:
                self._seconds[part.cause] += part.ms / 1e3

    def collect(self) -> Iterator[Metric]:
        stalls, seconds, busy = declared.STALLS.empty(), declared.STALL_SECONDS.empty(), declared.LOOP_BUSY.empty()
        for cause in StallCause:
            stalls.add_metric((cause.value,), self._stalls[cause])
            seconds.add_metric((cause.value,), self._seconds[cause])
        busy.add_metric((), self._loop_busy_s())
        yield from (stalls, seconds, busy)


class Exposition(NamedTuple):
    body: bytes
    media_type: str


_OPENMETRICS = "application/openmetrics-text"
METRIC_FORMATS = (CONTENT_TYPE_PLAIN_0_0_4, openmetrics.CONTENT_TYPE_LATEST)
"""Media types of /metrics."""


def exposition(registry: CollectorRegistry, accept: str) -> Exposition:
    """In the format that the `Accept` header of a scraper prefers: OpenMetrics, or Prometheus' own text."""
    weighed = [_weighed(accepted) for accepted in accept.split(",")]
    wanted, plain = (
        max((weight for name, weight in weighed if name == wanted), default=0.0)
        for wanted in (_OPENMETRICS, "text/plain")
    )
    if wanted > 0.0 and wanted >= plain:
        # Any other escaping makes underscores of the colons in our names, which then differ from those of the text.
        text = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)
        return Exposition(text, openmetrics.CONTENT_TYPE_LATEST)
    return Exposition(generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4)


def _weighed(accepted: str) -> tuple[str, float]:
    """A media type of an `Accept` header with its weight, 1 where none is given; 0 for one that is malformed."""
    media_type, *parameters = (part.strip().lower() for part in accepted.split(";"))
    weight = next((part.removeprefix("q=") for part in parameters if part.startswith("q=")), "1")
    try:
        return media_type, float(weight)
    except ValueError:
        return media_type, 0.0
