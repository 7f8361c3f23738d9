"""Admin servicer: workers, blocks, load and requests as this router sees them."""

import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import grpc

from baton.process.errors import InvalidArgument
from baton.process.registry.worker_record import WorkerRole
from baton.protos import admin_pb2
from baton.router.admin.explain import Explainer
from baton.router.admin.requests import limit_of, recent_request
from baton.router.admin.timeline import Timelines
from baton.router.admin.wire import ROLES, adapter_status, latency_status, request_totals, router_status, worker_status
from baton.router.dispatcher import Dispatcher
from baton.router.fleet.fleet import WorkerLinks
from baton.router.fleet.peers import PeerRouters
from baton.router.fleet.wire import versions_message
from baton.router.placement.cluster import Cluster, Worker
from baton.router.public.service import service_handler
from baton.router.roles import RolePlanning
from baton.router.trace.latency import RecentLatency, WorkerTokenTimes
from baton.router.trace.spans import RecordObserver
from baton.versions import OWN

SERVICE_NAME = "baton.v1.AdminService"
MAX_WAIT_S = 600.0  # maximum wait of UnloadAdapter for requests that use the adapter


@dataclass(frozen=True, slots=True)
class RequestHistory:
    """History of the newest requests. The owner must call each of `observers` with every completed request."""

    explainer: Explainer
    latency: RecentLatency
    token_times: WorkerTokenTimes
    timelines: Timelines

    @property
    def observers(self) -> tuple[RecordObserver, ...]:
        tokens = self.timelines.tokens
        return (self.token_times.observe, self.latency.observe, self.explainer.observe, tokens.observe)


@dataclass(frozen=True, slots=True)
class AdminServicer:
    """gRPC servicer of the admin port. `registry_problem` returns why calls of Redis fail; empty if they succeed."""

    cluster: Cluster
    dispatcher: Dispatcher
    fleet: WorkerLinks
    history: RequestHistory
    peer_routers: PeerRouters | None
    planning: RolePlanning | None
    registry_problem: Callable[[], str]

    def register(self, server: grpc.aio.Server) -> None:
        service = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
        server.add_generic_rpc_handlers((service_handler(service, self),))

    async def GetStatus(
        self, message: admin_pb2.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.GetStatusResponse:
        registry_problem = self.registry_problem()
        latency = self.history.latency.figures(time.monotonic())
        readiness = self.dispatcher.readiness
        refused, name_of = readiness.refused, self.cluster.name_of
        gaps = [readiness.detail, *_missing(readiness.needed | self.cluster.roles_seen, self.cluster.workers)]
        gaps += [f"{name_of(endpoint)} is refused" for endpoint in refused if name_of(endpoint) not in readiness.detail]
        if registry_problem:
            gaps.append(f"the registry does not answer; the router keeps the workers it knows ({registry_problem})")
        return admin_pb2.GetStatusResponse(
            ready=readiness.ready,
            detail="; ".join(gap for gap in gaps if gap),
            registry_connected=not registry_problem,
            workers=[
                worker_status(
                    worker,
                    self.cluster.caches.status(worker.endpoint),
                    self.cluster.tiers.known(worker.endpoint),
                    self.cluster.departures[self.cluster.name_of(worker.endpoint)],
                    self.history.token_times.quantiles(worker.endpoint),
                    refused.get(worker.endpoint, ""),
                )
                for worker in self.cluster.workers
            ],
            indexed_blocks=len(self.cluster.caches.index),
            active_requests=self.dispatcher.active,
            queued_requests=self.dispatcher.queued,
            other_routers=self.peer_routers.others if self.peer_routers is not None else 0,
            routers=self._routers(),
            planner=self._planner(),
            latency=latency_status(latency) if latency is not None else None,
            requests=request_totals(self.dispatcher.accounts.counts),
            versions=versions_message(OWN),
            model_version=self.dispatcher.version,
            tool_format=self.dispatcher.tool_format,
        )

    def _routers(self) -> list[admin_pb2.RouterStatus]:
        decode = {worker.endpoint for worker in self.cluster.workers if worker.role is WorkerRole.DECODE}
        return [
            router_status(share, decode)
            for share in (self.peer_routers.shares if self.peer_routers is not None else ())
        ]

    async def Explain(
        self, message: admin_pb2.ExplainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.ExplainResponse:
        return self.history.explainer.explain(message.request_id)

    async def GetTimelines(
        self, message: admin_pb2.GetTimelinesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        async for timeline in self.history.timelines.collect(message):
            await context.write(admin_pb2.GetTimelinesResponse(process=timeline))

    async def RecentRequests(
        self, message: admin_pb2.RecentRequestsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.RecentRequestsResponse:
        accounts = self.dispatcher.accounts
        if message.request_id:
            named = accounts.find(message.request_id)
            shown = [named] if named is not None else []
        else:
            shown = accounts.newest(limit_of(message))
        now, name_of = time.monotonic(), self.cluster.name_of
        return admin_pb2.RecentRequestsResponse(requests=[recent_request(each, now, name_of) for each in shown])

    async def Why(
        self, message: admin_pb2.WhyRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.WhyResponse:
        return self.history.explainer.why(message.request_id)

    async def ChangeRole(
        self, message: admin_pb2.ChangeRoleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.ChangeRoleResponse:
        role = next((role for role, number in ROLES.items() if number == message.role), None)
        if role is None:
            raise InvalidArgument("role", "must be prefill or decode")
        self.fleet.change_role(message.worker_id, role)
        return admin_pb2.ChangeRoleResponse()

    async def LoadAdapter(
        self, message: admin_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.LoadAdapterResponse:
        adapter, worker_ids = await self.dispatcher.load_adapter(message.name, message.path, message.replace)
        return admin_pb2.LoadAdapterResponse(digest=adapter.digest, worker_ids=worker_ids)

    async def Reload(
        self, message: admin_pb2.ReloadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.ReloadResponse:
        chosen, worker_ids = await self.dispatcher.reload(message.path, message.grace_s)
        return admin_pb2.ReloadResponse(version=chosen.version, worker_ids=worker_ids)

    async def UnloadAdapter(
        self, message: admin_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.UnloadAdapterResponse:
        if not 0 <= message.wait_s <= MAX_WAIT_S:
            raise InvalidArgument("wait_s", f"must be from 0 to {MAX_WAIT_S:g} s")
        return admin_pb2.UnloadAdapterResponse(
            worker_ids=await self.dispatcher.unload_adapter(message.name, message.wait_s)
        )

    async def ListAdapters(
        self, message: admin_pb2.ListAdaptersRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.ListAdaptersResponse:
        return admin_pb2.ListAdaptersResponse(adapters=map(adapter_status, self.fleet.adapters.views()))

    def _planner(self) -> admin_pb2.PlannerStatus | None:
        if self.planning is None:
            return None
        verdict, desired = self.planning.verdict, self.planning.desired
        return admin_pb2.PlannerStatus(
            mode=self.planning.mode,
            prefill_pressure=verdict.prefill_pressure,
            decode_pressure=verdict.decode_pressure,
            verdict=verdict.why,
            changes=self.planning.changes,
            desired_prefill_workers=desired.get(WorkerRole.PREFILL, 0),
            desired_decode_workers=desired.get(WorkerRole.DECODE, 0),
        )


def _missing(needed: Set[WorkerRole], workers: Sequence[Worker]) -> list[str]:
    """Return a message for each needed role without a connected worker. The router may still be ready: a lost link can
    reconnect within its grace, and decode workers can compute prompts themselves.
    """
    filled = {worker.role for worker in workers if worker.connected}
    return [f"no {role.value} worker is connected" for role in ROLES if role in needed and role not in filled]
