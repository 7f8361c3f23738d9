"""The router's process: builds everything once, from the config, and closes it in reverse order."""

import asyncio
import itertools
import logging
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

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
from baton.router.dispatcher import Dispatcher, DispatcherLimits
from baton.router.fleet.fleet import WorkerSessions
from baton.router.fleet.peers import PeerRouters
from baton.router.fleet.session import SessionTiming
from baton.router.placement.cluster import Cluster
from baton.router.placement.decide import PlacementPolicy
from baton.router.placement.planner import Planner, PlannerTiming
from baton.router.placement.replicas import Replicas, ReplicaTiming
from baton.router.public.access import Access, AdminAccess
from baton.router.public.parsing import Prevalidation
from baton.router.public.service import SERVICE_NAME, BatonServicer
from baton.router.readiness import Readiness
from baton.router.request import journal as journal_wire
from baton.router.request.journal import Journal, Streams
from baton.router.request.run import RequestDeps
from baton.router.roles import RolePlanning, SloTargets
from baton.router.trace.latency import RecentLatency
from baton.router.trace.spans import ServerAddress, Tracer
from baton.router.trace.stalls import StallBound
from baton.text.cpu_wait import ProcessQueue, QueueTime

logger = logging.getLogger(__name__)

PLANNER_LEASE_MS = 3000
SWITCH_INTERVAL_S = 0.0005  # threads beside the event loop (tokenizer, large messages) must not keep it for 5 ms


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


class RouterProcess:
    """A `service.server.Process`. Made within a running event loop."""

    def __init__(self, config: RouterConfig, telemetry: Telemetry) -> None:
        self._config = config
        self._telemetry = telemetry
        self._tasks: list[asyncio.Task[None]] = []
        self._running: Running | None = None
        self._registry, self._membership = _membership(config)
        self._keys = keys = config.open_keys()
        self.access = Access(None if keys is None else lambda: keys.ring)
        """Callers that are allowed, over HTTP too."""
        self.cluster = cluster = Cluster()
        policy = placement_policy(config)
        timing = session_timing(config)
        router_id = secrets.token_bytes(16)
        tls, secret = config.internal_tls, config.cluster_secret
        self._adapter_store = _adapter_store(config)
        self._fleet = fleet = WorkerSessions(
            cluster, timing, router_id, tls, secret, self._adapter_store, on_change=self._on_workers_changed
        )
        self._queue = queue = AdmissionQueue(
            cluster,
            admission_limits(config),
            policy,
            on_fault=self._on_fault,
            on_credit_request=fleet.request_credit,
        )
        scheduling = RequestDeps(cluster, fleet, queue, itertools.count(1), config.attempts)
        self._readiness = self._make_readiness(scheduling, policy)
        self._queue_time = QueueTime(threading.get_native_id())
        self._process_queue = ProcessQueue()
        self._lag = LoopLag(asyncio.get_running_loop(), self._queue_time.read_s, self._process_queue.share)
        bound = StallBound(config.stall_factor, config.stall_min_ms)
        self.tracer = tracer = Tracer(telemetry, cluster.name_of, bound, self._lag.between)
        meters = KeyMeters()
        self._shares = _shares(config, router_id)
        self._peer_routers = self._meet_peers(self._shares, router_id, meters)
        self._journal_store = _journal_store(config, router_id)
        self.journal = self._open_journal(self._journal_store, router_id)
        """Journal in Redis; None without it."""
        self.streams = Streams(router_id, self.journal, self._took_over)
        self._planning = _planning(config, cluster, queue, fleet, self._shares)
        explainer = Explainer(tracer.recent, cluster.name_of, caches=cluster.caches)
        latency = RecentLatency()
        tracer.readers += [latency.observe, explainer.observe, *([self._planning.observe] if self._planning else [])]
        self._dispatcher = Dispatcher(
            self._readiness,
            scheduling,
            tracer,
            DispatcherLimits(config.default_deadline_s, config.max_active),
            self.streams,
            meters,
        )
        self.prevalidation = Prevalidation(Helper("baton.router.public.parsing"))
        self._admin = AdminServicer(
            cluster,
            self._dispatcher,
            lambda: self.registry_connected,
            self._fleet,
            RequestHistory(explainer, latency, Timelines(tracer.recent, lambda: cluster.workers, tls, secret)),
            self._peer_routers,
            self._planning,
            lambda: self.registry_problem,
        )

    @property
    def desired(self) -> Mapping[WorkerRole, int]:
        """Workers that there should be, by role; empty with `--planner off`."""
        return {} if self._planning is None else self._planning.desired

    def _make_readiness(self, scheduling: RequestDeps, policy: PlacementPolicy) -> Readiness:
        config = self._config
        named, known_bytes = (config.model, config.model_name), config.known_prompts_mib << 20
        tool_format = "" if config.tool_format == "auto" else config.tool_format
        return Readiness(scheduling, policy, *named, config.ready_wait_s, self._on_readiness, known_bytes, tool_format)

    def _meet_peers(self, shares: RedisShares | None, router_id: bytes, meters: KeyMeters) -> PeerRouters | None:
        if shares is None:
            return None
        address = address_of(self._config)
        return PeerRouters(self.cluster, shares, router_id, self._end_stream, meters, address=address)

    def _open_journal(self, store: RedisJournal | None, router_id: bytes) -> Journal | None:
        if store is None:
            return None
        return Journal(store, router_id, journal_wire.to_bytes, self._end_stream)

    @property
    def dispatcher(self) -> Dispatcher:
        """Answer requests, also those that arrive by another way than gRPC."""
        return self._dispatcher

    @property
    def queue(self) -> AdmissionQueue:
        return self._queue

    @property
    def readiness(self) -> Readiness:
        return self._readiness

    @property
    def loop_busy_s(self) -> float:
        """Time for which this process's event loop was too busy to process events, in seconds since the start."""
        return self._lag.busy_s

    @property
    def registry_connected(self) -> bool:
        return not self.registry_problem

    @property
    def registry_problem(self) -> str:
        """Reason why Redis rejects writes of this router and its workers; empty if it does not."""
        parts = (self._membership, self._peer_routers, self.journal)
        return next((part.problem for part in parts if part is not None and part.problem), "")

    @property
    def listeners(self) -> Sequence[Listener]:
        config = self._config
        public = BatonServicer(self._dispatcher, self.access, self.prevalidation)
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
            ),
            Listener(
                config.admin_host,
                config.admin_port,
                self._admin.register,
                (ADMIN_SERVICE_NAME,),
                reflection=config.reflection and not admin.is_guarded,
                authorise=admin.authorise if admin.is_guarded else None,
                option="--admin-port",
            ),
        )

    def _admin_token(self) -> str:
        secret, running = self._config.cluster_secret, self._running
        if secret is None or running is None:
            raise Unauthenticated("the router is starting", "STARTING")
        return secret.admin_token(running.ports[1])

    async def start(self, running: Running) -> None:
        self._running = running
        public, admin = running.ports
        self.tracer.server = ServerAddress(_host(self._config), public)
        logger.info("gRPC on %s, admin port %d", host_and_port(self._config.host, public), admin)
        config = self._config
        risks = warnings(config.public_hosts, config.admin_host, self.access.is_guarded, config.tls is not None)
        for risk in risks:
            logger.warning("%s", risk)
        running.reloads += [] if self._keys is None else [self._keys.reload]
        self._lag.start()
        await self._membership.start()
        works = [("fleet", self._fleet.follow(self._membership)), ("readiness", self._readiness.run())]
        works += [("adapters", self._fleet.adapters.run())] if self._adapter_store is not None else []
        works += [("peer_routers", self._peer_routers.run())] if self._peer_routers is not None else []
        works += [("journal", self.journal.run())] if self.journal is not None else []
        works += [("planning", self._planning.run())] if self._planning is not None else []
        works += [("keys", self._keys.run())] if self._keys is not None else []
        for name, work in works:
            task = asyncio.create_task(work, name=name)
            task.add_done_callback(self._on_task_done)
            self._tasks.append(task)

    async def drain(self) -> None:
        await self._dispatcher.drain()

    async def stop(self) -> None:
        self._lag.close()
        self._queue_time.close()
        self._process_queue.close()
        self._queue.close()
        for task in reversed(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._membership.close()
        self.prevalidation.close()
        if self._shares is not None:
            await self._shares.close()
        if self._journal_store is not None:
            await self._journal_store.close()
        if self._adapter_store is not None:
            await self._adapter_store.close()
        if self._registry is not None:
            await self._registry.close()
        self._telemetry.close()

    def _end_stream(self, number: int) -> None:
        self.streams.end(number)

    def _took_over(self, router_id: bytes, stream: int) -> None:
        if self._peer_routers is not None:
            self._peer_routers.took_over(router_id, stream)

    def _on_workers_changed(self) -> None:
        self._queue.pump_soon()
        self._readiness.notice()

    async def _on_readiness(self, ready: bool) -> None:
        if self._running is not None and not self._running.stopping.is_set():
            await self._running.health.set_serving(ready)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """End the process with a task that ended without being cancelled: a router without it serves no request."""
        ended_on_cancel = task.cancelled() or (task.cancelling() > 0 and task.exception() is None)
        if ended_on_cancel or self._running is None:
            return
        logger.critical("task %s ended; the process exits", task.get_name(), exc_info=task.exception())
        self._running.stop(exit_code=1)

    def _on_fault(self, error: Exception) -> None:
        logger.critical("the admission queue failed; the process exits", exc_info=error)
        if self._running is not None:
            self._running.stop(exit_code=1)


def admission_limits(config: RouterConfig) -> AdmissionLimits:
    return AdmissionLimits(config.max_waiting, config.max_wait_s, config.ready_wait_s, config.max_waiting_per_tenant)


def session_timing(config: RouterConfig) -> SessionTiming:
    return SessionTiming(config.worker_reconnect_s, config.session_silence_s)


def placement_policy(config: RouterConfig) -> PlacementPolicy:
    return PlacementPolicy(config.no_prefill_worker, config.local_prefill_tokens, config.placement)


def _host(config: RouterConfig) -> str:
    return socket.gethostname() if config.host in ("0.0.0.0", "::") else config.host


def address_of(config: RouterConfig) -> str:
    """Return the address by which other routers and operators know this router."""
    return host_and_port(_host(config), config.port)


def _shares(config: RouterConfig, router_id: bytes) -> RedisShares | None:
    return (
        None
        if config.redis_url is None
        else RedisShares(config.redis_url, config.namespace, router_id.hex(), config.cluster_secret)
    )


def _adapter_store(config: RouterConfig) -> RedisAdapters | None:
    return (
        None if config.redis_url is None else RedisAdapters(config.redis_url, config.namespace, config.cluster_secret)
    )


def _journal_store(config: RouterConfig, router_id: bytes) -> RedisJournal | None:
    return (
        None
        if config.redis_url is None
        else RedisJournal(config.redis_url, config.namespace, router_id, config.cluster_secret)
    )


def _planning(
    config: RouterConfig, cluster: Cluster, queue: AdmissionQueue, fleet: WorkerSessions, shares: RedisShares | None
) -> RolePlanning | None:
    if config.planner == "off":
        return None

    async def may_act() -> bool:
        """Return whether this router's planner may act: one router of several holds the lease;
        without Redis, always.
        """
        if shares is None:
            return True
        try:
            return await shares.lease(PLANNER_LEASE_MS)
        except RegistryUnavailable:
            return False

    timing = PlannerTiming(config.planner_hold_s, config.planner_cool_down_s)
    targets = SloTargets(config.planner_ttft_ms, config.planner_tbt_ms)
    replicas = Replicas(ReplicaTiming(down_s=config.scale_down_s))
    return RolePlanning(config.planner, targets, Planner(timing), cluster, queue, fleet, may_act, replicas)


def _membership(config: RouterConfig) -> tuple[RedisRegistry | None, MembershipSource]:
    if config.workers:
        return None, StaticMembership(config.workers)
    registry = open_registry(config.redis_url, config.namespace, config.cluster_secret)
    if registry is None:
        raise ValueError("the configuration names neither workers nor a registry")
    return registry, Membership(registry)
