"""The operator's servicer: workers, pages and load as this router sees them."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import grpc

from protos import admin_pb2, report_pb2, session_pb2
from router.admission import AdmissionQueue
from router.cluster import Cluster, Worker
from router.dispatcher import Dispatcher
from router.malformed import service_handler
from router.readiness import Readiness
from router.worker import WorkerDescription, WorkerReport, WorkerRole

SERVICE_NAME = "baton.v1.AdminService"

_ROLES = {WorkerRole.PREFILL: session_pb2.ROLE_PREFILL, WorkerRole.DECODE: session_pb2.ROLE_DECODE}


@dataclass(frozen=True, slots=True)
class AdminServicer:
    cluster: Cluster
    queue: AdmissionQueue
    readiness: Readiness
    dispatcher: Dispatcher
    registry_connected: Callable[[], bool]

    def register(self, server: grpc.aio.Server) -> None:
        service = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
        server.add_generic_rpc_handlers((service_handler(service, self),))

    async def GetStatus(
        self, message: admin_pb2.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.GetStatusResponse:
        connected = self.registry_connected()
        needed = self.readiness.needed | self.cluster.roles_seen
        gaps = [self.readiness.detail, *_missing(needed, self.cluster.workers)]
        if not connected:
            gaps.append("the registry does not answer; membership is as last seen")
        return admin_pb2.GetStatusResponse(
            ready=self.readiness.ready,
            detail="; ".join(gap for gap in gaps if gap),
            registry_connected=connected,
            workers=[_worker_status(worker) for worker in self.cluster.workers],
            active_requests=self.dispatcher.active,
            queued_requests=self.queue.waiting,
        )


def _missing(needed: Set[WorkerRole], workers: Sequence[Worker]) -> list[str]:
    """Roles that nobody fills now. The router may call itself ready: a lost connection has a moment to come back, and
    decode workers may do without prefill workers for a while.
    """
    filled = {worker.role for worker in workers if worker.connected}
    return [f"no {role.value} worker is connected" for role in _ROLES if role in needed and role not in filled]


def _worker_status(worker: Worker) -> admin_pb2.WorkerStatus:
    return admin_pb2.WorkerStatus(
        worker=_worker_info(worker.description)
        if worker.description is not None
        else session_pb2.WorkerInfo(role=_ROLES[worker.role]),
        endpoint=worker.endpoint,
        connected=worker.connected,
        epoch=worker.epoch,
        report=_report(worker.report) if worker.report is not None else None,
        in_flight_requests=len(worker.charges),
    )


def _worker_info(description: WorkerDescription) -> session_pb2.WorkerInfo:
    model = description.model
    return session_pb2.WorkerInfo(
        worker_id=description.worker_id,
        role=_ROLES[description.role],
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
        adapters=[session_pb2.Adapter(name=each.name, digest=each.digest) for each in description.adapters],
    )


def _report(report: WorkerReport) -> report_pb2.Report:
    pages = report.pages
    return report_pb2.Report(
        limit_blocks=report.limit_blocks,
        limit_slots=report.limit_slots,
        pages=report_pb2.PageCounts(
            total=pages.total,
            free=pages.free,
            cached=pages.cached,
            held=pages.held,
            held_by_sequences=pages.held_by_sequences,
            held_by_transfers=pages.held_by_transfers,
        ),
        waiting_requests=report.waiting_requests,
        running_sequences=report.running_sequences,
        pending_tokens=report.pending_tokens,
        draining=report.draining,
        steps=report.steps,
        cache_query_tokens=report.cache_query_tokens,
        cache_hit_tokens=report.cache_hit_tokens,
        preemptions=report.preemptions,
        unfilled_slots=report.unfilled_slots,
        links=[
            report_pb2.LinkReport(
                endpoint=link.endpoint, transport=link.transport, gb_per_s=link.gb_per_s, fallback=link.fallback
            )
            for link in report.links
        ],
    )
