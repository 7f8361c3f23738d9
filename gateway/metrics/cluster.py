"""The workers as this router sees them, at the moment of the scrape. Names are vLLM's where it has one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from baton.gateway.metrics.requests import LABELS
from baton.router.admission.queue import AdmissionQueue
from baton.router.dispatcher import Dispatcher
from baton.router.placement.cluster import Cluster
from baton.router.readiness import Readiness
from baton.router.types.worker import WorkerDescription, WorkerReport

Reading = Callable[[WorkerDescription, WorkerReport], float]

_GAUGES: dict[str, tuple[str, Reading]] = {
    "vllm:num_requests_running": ("Sequences in the batch.", lambda worker, report: report.running_sequences),
    "vllm:num_requests_waiting": ("Requests that wait in the worker.", lambda worker, report: report.waiting_requests),
    "vllm:kv_cache_usage_perc": ("Share of KV blocks that are held.", lambda worker, report: _held(report)),
    "vllm:gpu_cache_usage_perc": ("The same, by its older name.", lambda worker, report: _held(report)),
    "baton:pending_tokens": ("Prompt tokens to be computed.", lambda worker, report: report.pending_tokens),
}
_COUNTERS: dict[str, tuple[str, Reading]] = {
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
class ClusterMetrics:
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
        for name, (help_text, read) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, help_text, labels=LABELS)
            for description, report in reporting:
                gauge.add_metric((description.model.name, description.worker_id), read(description, report))
            yield gauge
        for name, (help_text, read) in _COUNTERS.items():
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
            ("baton:ready", "1 where a canary came back.", int(self.readiness.ready)),
            ("baton:http_connections", "Open now.", self.connections()),
            ("baton:registry_connected", "0 where Redis does not answer.", int(self.registry_connected())),
        ):
            yield GaugeMetricFamily(name, help_text, value=value)


def _held(report: WorkerReport) -> float:
    return report.pages.held / report.pages.total if report.pages.total else 0.0
