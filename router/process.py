"""Router process: builds all components from the configuration, and closes them in reverse order."""

import asyncio
import itertools
import logging
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from baton.process.affinity import pin_process
from baton.process.config import log_notices, read_config_or_exit
from baton.process.errors import Unauthenticated
from baton.process.helper import Helper
from baton.process.registry.membership import Membership, MembershipSource, StaticMembership, open_registry
from baton.process.registry.redis_registry import RedisRegistry, RegistryUnavailable
from baton.process.registry.redis_routers import RedisAdapters, RedisJournal, RedisShares
from baton.process.registry.worker_record import WorkerRole
from baton.process.serving.addresses import host_and_port
from baton.process.serving.grpc_options import PUBLIC_SERVER_OPTIONS
from baton.process.serving.server import Listener, Running, run, serve
from baton.process.telemetry.export import open_telemetry
from baton.process.telemetry.logs import configure_logging
from baton.process.telemetry.loop_lag import LoopLag
from baton.process.telemetry.spans import Telemetry
from baton.router.admin.explain import Explainer
from baton.router.admin.service import SERVICE_NAME as ADMIN_SERVICE_NAME
from baton.router.admin.service import AdminServicer, RequestHistory
from baton.router.admin.timeline import Timelines
from baton.router.admission.key_limits import KeyMeters
from baton.router.admission.queue import AdmissionLimits, AdmissionQueue
from baton.router.config import RouterConfig, warnings
from baton.router.dispatcher import Dispatcher, DispatcherLimits, RequestCounts
from baton.router.fleet.fleet import WorkerLinks
from baton.router.fleet.link import LinkTiming
from baton.router.fleet.peers import PeerRouters
from baton.router.model.served_model import ServedModelSettings
from baton.router.placement.cluster import Cluster
from baton.router.placement.decide import NoPrefillWorker, PlacementPolicy
from baton.router.placement.planner import Planner, PlannerTiming
from baton.router.placement.replicas import Replicas, ReplicaTiming
from baton.router.public.access import Access, AdminAccess
from baton.router.public.parsing import Prevalidation
from baton.router.public.service import SERVICE_NAME, BatonServicer
from baton.router.readiness import Readiness
from baton.router.request import journal as journal_wire
from baton.router.request.journal import Journal, Streams
from baton.router.request.run import RequestDeps
from baton.router.roles import RolePlanning
from baton.router.trace.latency import RecentLatency, WorkerTokenTimes
from baton.router.trace.report import RecentReports
from baton.router.trace.spans import RecordObserver, ServerAddress, Tracer
from baton.router.trace.stalls import StallBound
from baton.router.trace.token_records import TokenRecords
from baton.router.types.plain import to_plain
from baton.text.cpu_wait import ProcessQueue, QueueTime

logger = logging.getLogger(__name__)

PLANNER_LEASE_MS = 3000
SWITCH_INTERVAL_S = 0.0005  # GIL switch interval: by default a tokenizer thread may delay the event loop by 5 ms


def run_router(command: str, make: "Callable[[RouterConfig, Telemetry], RouterProcess]") -> int:
    """Run the router until a signal stops it, and return the exit code."""
    config = read_config_or_exit(RouterConfig, command)
    configure_logging("router", config.log_format, config.log_level)
    log_notices(config)
    sys.setswitchinterval(SWITCH_INTERVAL_S)

    async def main() -> int:
        if config.internal_tls is not None:
            config.internal_tls.check()
        if config.cores is not None:
            pin_process(config.cores)
        telemetry = open_telemetry("router", config.collector, config.trace_file)
        return await serve(make(config, telemetry), grace_s=config.drain_s, run_id=config.run_id)

    return run(main())


class _Runnable(Protocol):
    def run(self) -> Coroutine[Any, Any, None]: ...


class RouterProcess:
    """The router as a `process.serving.server.Process`. Construct it within a running event loop."""

    def __init__(
        self,
        config: RouterConfig,
        telemetry: Telemetry,
        counts: RequestCounts | None = None,
        observers: Sequence[RecordObserver] = (),
        late_observers: Sequence[RecordObserver] = (),
    ) -> None:
        """Build all components. `counts`: see Dispatcher. `observers`, `late_observers`: see Tracer."""
        self._config = config
        self._telemetry = telemetry
        self._tasks: list[asyncio.Task[None]] = []
        self._running: Running | None = None
        self._registry, self._membership = _membership(config)
        self._keys = keys = config.open_keys()
        self.access = Access(None if keys is None else lambda: keys.ring)
        """Access rules of gRPC and HTTP."""
        self._router_id = secrets.token_bytes(16)
        self._stores = _open_stores(config, self._router_id)
        self.cluster = Cluster()
        self._fleet = self._make_fleet()
        self.queue = self._make_queue()
        deps = RequestDeps(self.cluster, self._fleet, self.queue, itertools.count(1), config.attempts)
        self.readiness = self._make_readiness(deps)
        self._meters = KeyMeters()
        self._peer_routers = self._make_peers()
        self.journal = self._open_journal()
        """Journal of streams in Redis; None without Redis."""
        self.streams = Streams(self._router_id, self.journal, self._on_taken_over)
        self._planning = _planning(config, self.cluster, self.queue, self._fleet, self._stores)
        self._process_queue, self._queue_time = ProcessQueue(), QueueTime(threading.get_native_id())
        self._lag = LoopLag(asyncio.get_running_loop(), self._queue_time.read_s, self._process_queue.share)
        recent = RecentReports()
        history = self._make_history(recent)
        planning = [] if self._planning is None else [self._planning.observe]
        self.tracer = self._make_tracer(recent, observers, (*history.observers, *planning, *late_observers))
        self.dispatcher = Dispatcher(
            self.readiness,
            deps,
            self.tracer,
            DispatcherLimits(config.default_deadline_s, config.max_active, config.objectives),
            self.streams,
            self._meters,
            counts,
        )
        """Answers requests of every transport."""
        self.prevalidation = Prevalidation(Helper("baton.router.public.parsing"))
        self.admin = AdminServicer(
            self.cluster,
            self.dispatcher,
            self._fleet,
            history,
            self._peer_routers,
            self._planning,
            lambda: self.registry_problem,
        )

    def _make_fleet(self) -> WorkerLinks:
        config = self._config
        return WorkerLinks(
            self.cluster,
            link_timing(config),
            self._router_id,
            config.internal_tls,
            config.cluster_secret,
            None if self._stores is None else self._stores.adapters,
            on_change=self._on_workers_changed,
            on_capacity=self._on_report,
        )

    def _make_queue(self) -> AdmissionQueue:
        return AdmissionQueue(
            self.cluster,
            admission_limits(self._config),
            placement_policy(self._config),
            on_fault=partial(self._exit, "the admission queue failed"),
            on_credit_request=self._fleet.request_credit,
        )

    def _make_tracer(
        self, recent: RecentReports, observers: Sequence[RecordObserver], late_observers: Sequence[RecordObserver]
    ) -> Tracer:
        return Tracer(
            self._telemetry,
            self.cluster.name_of,
            StallBound(self._config.stall_factor, self._config.stall_min_ms),
            self._lag.between,
            recent,
            self._server_address,
            observers,
            late_observers,
        )

    @property
    def desired(self) -> Mapping[WorkerRole, int]:
        """Desired number of workers by role; empty with `--planner off`."""
        return {} if self._planning is None else self._planning.desired

    @property
    def peers(self) -> int:
        """Number of other routers whose record in Redis is recent."""
        return 0 if self._peer_routers is None else self._peer_routers.others

    @property
    def loop_busy_s(self) -> float:
        """Seconds since the start in which this process's event loop was busy and events had to wait."""
        return self._lag.busy_s

    @property
    def registry_connected(self) -> bool:
        return not self.registry_problem

    @property
    def registry_problem(self) -> str:
        """Reason why Redis is not available or rejects writes; empty if all is well or Redis is not used."""
        parts = (self._membership, self._peer_routers, self.journal)
        return next((part.problem for part in parts if part is not None and part.problem), "")

    @property
    def listeners(self) -> Sequence[Listener]:
        config = self._config
        public = BatonServicer(self.dispatcher, self.access, self.prevalidation)
        guarded = self.access.is_guarded
        admin = AdminAccess(self.access, None if config.cluster_secret is None else self._admin_token)
        return (
            Listener(
                config.host,
                config.port,
                public.register,
                (SERVICE_NAME,),
                reflection=config.reflection and not guarded,
                authorise=public.authorise if guarded else None,
                tls=config.tls,
                options=PUBLIC_SERVER_OPTIONS,
                shared=config.share_ports,
            ),
            Listener(
                config.admin_host,
                config.admin_port,
                self.admin.register,
                (ADMIN_SERVICE_NAME,),
                reflection=config.reflection and not admin.is_guarded,
                authorise=admin.authorise if admin.is_guarded else None,
                option="--admin-port",
            ),
        )

    async def start(self, running: Running) -> None:
        self._running = running
        config, (public, admin) = self._config, running.ports
        logger.info("gRPC on %s, admin port %d", host_and_port(config.host, public), admin)
        for risk in warnings(config.public_hosts, config.admin_host, self.access.is_guarded, config.tls is not None):
            logger.warning("%s", risk)
        self._lag.start()
        await self._membership.start()
        if self._keys is not None:
            running.reloads.append(self._keys.reload)
        parts: dict[str, _Runnable | None] = {
            "readiness": self.readiness,
            "adapters": None if self._stores is None else self._fleet.adapters,
            "peer_routers": self._peer_routers,
            "journal": self.journal,
            "planning": self._planning,
            "keys": self._keys,
        }
        works = [("fleet", self._fleet.follow(self._membership))]
        works += [(name, part.run()) for name, part in parts.items() if part is not None]
        for name, work in works:
            task = asyncio.create_task(work, name=name)
            task.add_done_callback(self._on_task_done)
            self._tasks.append(task)

    async def drain(self) -> None:
        await self.dispatcher.drain()

    async def stop(self) -> None:
        self._lag.close()
        self._queue_time.close()
        self._process_queue.close()
        self.queue.close()
        for task in reversed(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._membership.close()
        self.prevalidation.close()
        for store in (*(self._stores or ()), self._registry):
            if store is not None:
                await store.close()
        self._telemetry.close()

    def _make_readiness(self, deps: RequestDeps) -> Readiness:
        config = self._config
        return Readiness(
            deps,
            config.no_prefill_worker is NoPrefillWorker.LOCAL,
            ServedModelSettings(
                config.model,
                config.model_name,
                config.known_prompts_mib << 20,
                "" if config.tool_format == "auto" else config.tool_format,
            ),
            config.ready_wait_s,
            self._on_readiness,
        )

    def _make_peers(self) -> PeerRouters | None:
        if self._stores is None:
            return None
        shares, address = self._stores.shares, address_of(self._config)
        return PeerRouters(
            self.cluster,
            shares,
            self._router_id,
            self._end_stream,
            self._meters,
            address=address,
            on_served=self.queue.served_elsewhere,
        )

    def _open_journal(self) -> Journal | None:
        if self._stores is None:
            return None
        return Journal(self._stores.journal, self._router_id, journal_wire.to_bytes, self._end_stream)

    def _make_history(self, recent: RecentReports) -> RequestHistory:
        config, cluster = self._config, self.cluster
        explainer = Explainer(recent, cluster.name_of, caches=cluster.caches)
        settings = {
            "policy": to_plain(placement_policy(config)),
            "ttft_slo_ms": config.objectives.ttft_ms,
            "tbt_slo_ms": config.objectives.tbt_ms,
        }
        tokens = TokenRecords(config.record_tokens_mib << 20)
        timelines = Timelines(
            recent, lambda: cluster.workers, config.internal_tls, config.cluster_secret, settings, tokens
        )
        return RequestHistory(explainer, RecentLatency(), WorkerTokenTimes(), timelines)

    def _admin_token(self) -> str:
        secret, running = self._config.cluster_secret, self._running
        if secret is None or running is None:
            raise Unauthenticated("the router is starting; retry", "STARTING")
        return secret.admin_token(running.ports[1])

    def _server_address(self) -> ServerAddress | None:
        return None if self._running is None else ServerAddress(_named(self._config.host), self._running.ports[0])

    def _end_stream(self, number: int) -> None:
        self.streams.end(number)

    def _on_taken_over(self, router_id: bytes, stream: int) -> None:
        if self._peer_routers is not None:
            self._peer_routers.took_over(router_id, stream)

    def _on_workers_changed(self) -> None:
        self.queue.pump_soon()
        self.readiness.notice()

    def _on_report(self) -> None:
        if self.queue.waiting:
            self.queue.pump_soon()

    async def _on_readiness(self, ready: bool) -> None:
        running = self._running
        if running is None or running.stopping.is_set():
            return
        if ready:
            await self.join(running)
        await running.health.set_serving(ready)

    async def join(self, running: Running) -> None:
        """Begin to listen on shared ports; later calls do nothing. Raises: ListenError."""
        await running.join()

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """Stop the process if a task ends without being cancelled, because the router needs all its tasks."""
        was_cancelled = task.cancelled() or (task.cancelling() > 0 and task.exception() is None)
        if not was_cancelled:
            self._exit(f"task {task.get_name()} ended", task.exception())

    def _exit(self, event: str, error: BaseException | None) -> None:
        logger.critical("%s; the process exits", event, exc_info=error)
        if self._running is not None:
            self._running.stop(exit_code=1)


def admission_limits(config: RouterConfig) -> AdmissionLimits:
    return AdmissionLimits(config.max_waiting, config.max_wait_s, config.ready_wait_s, config.max_waiting_per_tenant)


def link_timing(config: RouterConfig) -> LinkTiming:
    return LinkTiming(config.worker_reconnect_s, config.session_silence_s)


def placement_policy(config: RouterConfig) -> PlacementPolicy:
    return PlacementPolicy(config.no_prefill_worker, config.local_prefill_tokens, config.placement)


def _named(host: str) -> str:
    return socket.gethostname() if host in ("0.0.0.0", "::") else host


def address_of(config: RouterConfig) -> str:
    """Return this router's host:port, by which operators reach it: the admin port's if routers share the public one."""
    if config.share_ports:
        return host_and_port(_named(config.admin_host), config.admin_port)
    return host_and_port(_named(config.host), config.port)


class _RedisStores(NamedTuple):
    """The router's stores in Redis."""

    shares: RedisShares
    journal: RedisJournal
    adapters: RedisAdapters


def _open_stores(config: RouterConfig, router_id: bytes) -> _RedisStores | None:
    url, namespace, secret = config.redis_url, config.namespace, config.cluster_secret
    if url is None:
        return None
    return _RedisStores(
        RedisShares(url, namespace, router_id.hex(), secret),
        RedisJournal(url, namespace, router_id, secret),
        RedisAdapters(url, namespace, secret),
    )


def _planning(
    config: RouterConfig, cluster: Cluster, queue: AdmissionQueue, fleet: WorkerLinks, stores: _RedisStores | None
) -> RolePlanning | None:
    if config.planner == "off":
        return None

    async def may_act() -> bool:
        """Return whether this router may change roles: with Redis, only the router that has the lease may."""
        if stores is None:
            return True
        try:
            return await stores.shares.lease(PLANNER_LEASE_MS)
        except RegistryUnavailable:
            return False

    timing = PlannerTiming(config.planner_hold_s, config.planner_cool_down_s)
    replicas = Replicas(ReplicaTiming(down_s=config.scale_down_s))
    return RolePlanning(config.planner, config.objectives, Planner(timing), cluster, queue, fleet, may_act, replicas)


def _membership(config: RouterConfig) -> tuple[RedisRegistry | None, MembershipSource]:
    if config.workers:
        return None, StaticMembership(config.workers)
    registry = open_registry(config.redis_url, config.namespace, config.cluster_secret)
    if registry is None:
        raise ValueError("neither workers nor Redis are configured; set --workers or --redis-url")
    return registry, Membership(registry)
