"""Conversion of the status of workers, routers and adapters into protobuf."""

from collections.abc import Collection
from dataclasses import asdict

from baton.process.registry.worker_record import WorkerRole
from baton.protos import admin_pb2, report_pb2, session_pb2, versions_pb2
from baton.router.cache.replica import CacheStatus
from baton.router.cache.tiers import KnownFiles
from baton.router.dispatcher import RequestCounts
from baton.router.fleet.adapters import AdapterView
from baton.router.fleet.wire import versions_message
from baton.router.placement.cluster import Departures, Worker
from baton.router.placement.peer_load import Share
from baton.router.trace.latency import LatencyQuantiles, RecentFigures
from baton.router.types.worker import WorkerDescription, WorkerReport

ROLES = {WorkerRole.PREFILL: session_pb2.ROLE_PREFILL, WorkerRole.DECODE: session_pb2.ROLE_DECODE}


def worker_status(
    worker: Worker,
    cache: CacheStatus | None,
    tier: KnownFiles | None,
    departures: Departures,
    tbt: LatencyQuantiles | None,
    refused: str = "",
) -> admin_pb2.WorkerStatus:
    """Return a worker's status. `tbt`: TBT quantiles of its newest answers. `refused`: why it gets no requests."""
    answering = worker.refused.description if worker.refused is not None else None
    description = answering or worker.description
    return admin_pb2.WorkerStatus(
        worker=_worker_info(description)
        if description is not None
        else session_pb2.WorkerInfo(worker_id=worker.name, role=ROLES[worker.role]),
        endpoint=worker.endpoint,
        connected=worker.connected,
        epoch=worker.epoch,
        report=_report(worker.report) if worker.report is not None else None,
        in_flight_requests=len(worker.charges),
        **asdict(departures),
        cache_view=admin_pb2.CacheViewStatus(**asdict(cache)) if cache is not None else None,
        tier_view=admin_pb2.TierViewStatus(**tier._asdict()) if tier is not None else None,
        tbt=admin_pb2.Quantiles(**tbt._asdict()) if tbt is not None else None,
        refused=refused,
    )


def request_totals(counts: RequestCounts) -> admin_pb2.RequestTotals:
    """Return the counts of requests since the router started."""
    return admin_pb2.RequestTotals(
        started=counts.started,
        ended=[
            admin_pb2.EndedRequests(outcome=outcome.value, reason=reason, count=count)
            for (outcome, reason), count in counts.ended.items()
        ],
        prompt_tokens=counts.prompt_tokens.total(),
        generated_tokens=counts.generated_tokens.total(),
    )


def router_status(share: Share, decode: Collection[str]) -> admin_pb2.RouterStatus:
    """Return another router's status. `decode`: endpoints of decode workers, whose loads give its request count."""
    return admin_pb2.RouterStatus(
        router_id=share.router_id,
        address=share.address,
        uptime_s=share.uptime_s,
        requests=sum(load.requests for endpoint, load in share.loads.items() if endpoint in decode),
        tokens=share.tokens,
        versions=versions_message(share.versions),
    )


def latency_status(latency: RecentFigures) -> admin_pb2.LatencyStatus:
    """Convert the recent TTFT and TBT of the router."""
    return admin_pb2.LatencyStatus(
        requests=latency.requests,
        ttft=admin_pb2.Quantiles(**latency.ttft._asdict()),
        tbt=admin_pb2.Quantiles(**latency.tbt._asdict()) if latency.tbt is not None else None,
    )


def _worker_info(description: WorkerDescription) -> session_pb2.WorkerInfo:
    model = description.model
    return session_pb2.WorkerInfo(
        worker_id=description.worker_id,
        role=ROLES[description.role],
        pid=description.pid,
        fingerprint=description.fingerprint,
        model=session_pb2.ModelInfo(
            name=model.name,
            path=model.path,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            dtype=model.dtype,
            block_size=model.block_tokens,
        ),
        total_blocks=description.total_blocks,
        total_slots=description.total_slots,
        roles=[ROLES[role] for role in description.roles],
        pool_id=description.pool_id,
        arithmetic=description.arithmetic,
        versions=versions_message(description.versions),
        kv=versions_pb2.KvContent(checkpoint=description.checkpoint, layout=description.kv_layout),
        adapters=[session_pb2.Adapter(**asdict(each)) for each in description.adapters],
    )


def _report(report: WorkerReport) -> report_pb2.Report:
    """Convert a worker's report, without the cache digest, which is only for routers."""
    numbers = {name: value for name, value in asdict(report).items() if name not in ("pages", "links", "cache")}
    return report_pb2.Report(
        **numbers,
        pages=report_pb2.PageCounts(**asdict(report.pages)),
        links=[report_pb2.LinkReport(**asdict(link)) for link in report.links],
    )


def adapter_status(view: AdapterView) -> admin_pb2.AdapterStatus:
    """Convert an adapter's state on the workers, as operators see it."""
    return admin_pb2.AdapterStatus(
        name=view.adapter.name,
        digest=view.adapter.digest,
        path=view.path,
        started=view.started,
        retired=view.retired,
        worker_ids=view.worker_ids,
        missing=[admin_pb2.MissingAdapter(worker_id=worker_id, why=why) for worker_id, why in view.missing],
    )
