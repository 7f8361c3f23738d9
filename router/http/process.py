"""Router process that serves HTTP in addition to gRPC. Both use the same dispatcher."""

import asyncio
import logging

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from baton.process.errors import BatonError
from baton.process.helper import Helper
from baton.process.registry.redis_responses import RedisResponses, ResponseBounds
from baton.process.serving.addresses import Address, check_free, host_and_port
from baton.process.serving.server import Running
from baton.process.telemetry.spans import Telemetry
from baton.router.config import RouterConfig
from baton.router.dispatcher import RequestCounts
from baton.router.http.app import REQUESTS, make_app
from baton.router.http.batches.check import CHECK_S, MODULE
from baton.router.http.batches.line import LineAnswerer, LineRoute
from baton.router.http.batches.lines import CHAT, COMPLETION, EMBEDDING, RESPONSES
from baton.router.http.batches.runner import BatchRunner
from baton.router.http.batches.storage import BatchBounds, BatchStorage
from baton.router.http.edge.endpoint import Guard, HttpTransport
from baton.router.http.edge.exchange import BodyReader
from baton.router.http.edge.server import HttpLimits, HttpServer
from baton.router.http.edge.sites import SiteRules, with_cors
from baton.router.http.key_metrics import KeyMetrics
from baton.router.http.messages import ChatRequest, CompletionRequest
from baton.router.http.metrics import ClusterMetrics, RequestMetrics, StallMetrics, StreamMetrics
from baton.router.http.page.state import PageState, RecentRequests
from baton.router.http.parse_process import Parser
from baton.router.http.responses.bodies import ResponseRequest
from baton.router.http.responses.store import MemoryRecords, ResponseStore
from baton.router.http.routes.batches import BatchRoutes
from baton.router.http.routes.chat import answer_chat
from baton.router.http.routes.completions import answer_completion
from baton.router.http.routes.responses import ResponseRoutes
from baton.router.http.vectors.answer import answer_embeddings
from baton.router.http.vectors.bodies import EmbeddingRequest
from baton.router.process import RouterProcess
from baton.router.trace.record import end_of

logger = logging.getLogger(__name__)

_LEAVE_S = 0.5  # time for requests on the last connections of a shared port, before the drain rejects requests


class HttpRouterProcess(RouterProcess):
    """Router process that serves HTTP in addition to gRPC. Construct it while an event loop is running."""

    def __init__(self, config: RouterConfig, telemetry: Telemetry) -> None:
        counts = RequestCounts()
        requests, stalls, recent = RequestMetrics(counts), StallMetrics(lambda: self.loop_busy_s), RecentRequests()
        observers = [requests.observe]
        metrics = CollectorRegistry(auto_describe=False)
        if config.has_keys:
            keys = KeyMetrics(lambda: self.access.limits, lambda: counts.running_by_tenant)
            observers.append(keys.observe)
            metrics.register(keys)
        super().__init__(config, telemetry, counts, observers, [stalls.observe, recent.observe])
        self.http_port = self.metrics_port = 0
        """Bound HTTP ports; 0 until this router listens there."""
        self._grpc_port = 0
        token_times = self.admin.history.token_times
        page = PageState(
            self.cluster,
            self.queue,
            self.readiness,
            self.dispatcher,
            self.access,
            recent,
            token_times,
            routers=lambda: 1 + self.peers if config.share_ports else 1,
        )
        bodies = BodyReader(config.http_max_body, config.http_all_bodies, config.http_body_s)
        self._parser = Parser(Helper("baton.router.http.parse_process"))
        transport = HttpTransport(bodies, self._parser)
        self._responses = _response_store(config)
        self.batches = self._open_batches(config)
        """Runner of batches; None without a folder for them."""
        self._batch_task: asyncio.Task[None] | None = None
        routes = make_app(
            self.dispatcher,
            self.readiness,
            metrics,
            page,
            transport,
            lambda: self._grpc_port,
            self._responses,
            config.http_adapters,
            None if self.batches is None else BatchRoutes(self.batches.storage, config.http_body_s),
        )
        sites = SiteRules((config.http_host, *config.allowed_hosts), config.cors_origins)
        app: ASGIApp = Guard(routes, self.access, sites, self._refused)
        if config.cors_origins:
            app = with_cors(app, config.cors_origins)
        limits = HttpLimits(config.http_max_connections, config.http_head_s, config.http_idle_s, config.http_stall_s)
        self._http = HttpServer(app, limits, config.tls)
        cluster = ClusterMetrics(
            self.cluster,
            self.queue,
            self.readiness,
            self.dispatcher,
            lambda: self._http.connections,
            lambda: self._http.slots.counts,
            lambda: self.registry_connected,
            lambda: self.desired,
        )
        for collector in (requests, stalls, cluster, StreamMetrics(self.streams, self.journal)):
            metrics.register(collector)

    async def start(self, running: Running) -> None:
        """Begin to listen for HTTP, except on a shared port, and start the router. Raises: ListenError, TlsError."""
        self._grpc_port, _ = running.ports
        config = self._config
        if config.share_ports:
            check_free(self._address, shared=True)
        else:
            await self._listen()
        if config.metrics_port is not None:
            metrics = Address("--metrics-port", config.http_host, config.metrics_port)
            self.metrics_port = await self._http.start(metrics)
            logger.info("HTTP of this router alone on %s", host_and_port(metrics.host, self.metrics_port))
        await super().start(running)
        if self.batches is not None:
            self._batch_task = asyncio.create_task(self.batches.run(), name="batches")
            self._batch_task.add_done_callback(self._on_task_done)

    async def join(self, running: Running) -> None:
        if not self.http_port:
            await self._listen()
        await super().join(running)

    async def drain(self) -> None:
        if self._config.share_ports:
            self._http.leave()
            await asyncio.sleep(_LEAVE_S)
        await super().drain()

    @property
    def _address(self) -> Address:
        return Address("--http-port", self._config.http_host, self._config.http_port)

    async def _listen(self) -> None:
        """Begin to listen on the HTTP port. Raises: ListenError, TlsError."""
        self.http_port = await self._http.start(self._address, self._config.share_ports)
        logger.info("HTTP on %s", host_and_port(self._address.host, self.http_port))

    def _refused(self, path: str, error: BatonError) -> None:
        if path in REQUESTS:
            self.dispatcher.accounts.counts.refuse(end_of(error, dispatched=False))

    async def stop(self) -> None:
        await self._http.stop()
        if self.batches is not None and self._batch_task is not None:
            self._batch_task.cancel()
            await asyncio.gather(self._batch_task, return_exceptions=True)
            self.batches.close()
        self._parser.close()
        await self._responses.close()
        await super().stop()

    def _open_batches(self, config: RouterConfig) -> BatchRunner | None:
        """Create the runner of batches; None without a folder for them."""
        if config.batch_dir is None:
            return None
        bounds = BatchBounds(
            config.batch_file_bytes, config.batch_key_bytes, config.batch_all_bytes, config.batch_ttl_s
        )
        routes = {
            CHAT: LineRoute(ChatRequest, answer_chat),
            COMPLETION: LineRoute(CompletionRequest, answer_completion),
            EMBEDDING: LineRoute(EmbeddingRequest, answer_embeddings),
            RESPONSES: LineRoute(ResponseRequest, ResponseRoutes(self._responses).create),
        }
        return BatchRunner(
            BatchStorage(config.batch_dir, bounds),
            LineAnswerer(self.dispatcher, self._parser, routes),
            Helper(MODULE, limit_s=CHECK_S),
            self.dispatcher,
            self.access,
            config.batch_lines,
            config.http_max_body,
        )


def _response_store(config: RouterConfig) -> ResponseStore:
    """Create the store of responses: in Redis, shared by all routers; without Redis in this process's memory."""
    ttl_s, per_key = config.responses_ttl_s, config.responses_per_key
    bounds = ResponseBounds(ttl_s, per_key, config.responses_key_bytes, config.responses_all_bytes)
    if config.redis_url is None:
        return ResponseStore(MemoryRecords(bounds), bounds)
    return ResponseStore(RedisResponses(config.redis_url, config.namespace, bounds, config.cluster_secret), bounds)
