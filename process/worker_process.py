"""The life of a worker process around its engine: load, announce, report, fence, drain. Knows no protobuf."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Protocol

from baton.process.registry.membership import Epoch, Registration, open_registry, take_epoch
from baton.process.registry.worker_record import WorkerRecord, WorkerRole
from baton.process.serving.addresses import host_and_port, is_loopback
from baton.process.serving.server import Listener, Running
from baton.process.worker_config import WorkerConfig
from baton.versions import OWN

logger = logging.getLogger(__name__)
DRAIN_POLL_S = 0.05


class Worker(Protocol):
    """The parts that differ between the workers: an engine that loads and stops, and a table of requests."""

    on_role: Callable[[Epoch], None]
    """Callback with the new epoch when another role serves."""

    @property
    def listener(self) -> Listener: ...
    @property
    def role(self) -> WorkerRole: ...
    @property
    def fingerprint(self) -> bytes: ...
    @property
    def busy(self) -> bool: ...
    @property
    def turns(self) -> int | None:
        """Moves while the engine does; None while there is none. On any thread."""

    async def start(self, on_fault: Callable[[BaseException], None]) -> None:
        """Loads and warms the engine; returns when it can serve."""

    def report(self) -> None: ...
    def begin_drain(self) -> None: ...
    async def stop(self) -> None: ...


def end_on_error(task: "asyncio.Task[None]", on_fault: Callable[[BaseException], None]) -> None:
    """Report an error of a task that is not awaited."""

    def ended(task: "asyncio.Task[None]") -> None:
        fault = None if task.cancelled() else task.exception()
        if fault is not None:
            logger.error("%s failed", task.get_name(), exc_info=fault)
            on_fault(fault)

    task.add_done_callback(ended)


async def take_worker_epoch(config: WorkerConfig) -> Epoch:
    """A fencing epoch for this life of the worker."""
    registry = open_registry(config.redis_url, config.namespace, config.cluster_secret)
    try:
        return await take_epoch(registry)
    finally:
        if registry is not None:
            await registry.close()


class WorkerProcess:
    """A `service.server.Process` for one worker."""

    def __init__(self, config: WorkerConfig, worker: Worker, epoch: Epoch) -> None:
        self._config = config
        self._worker = worker
        self._epoch = epoch
        self._registration: Registration | None = None
        self._reports: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._lost = False  # the engine is gone: open requests will never be done

    @property
    def listeners(self) -> Sequence[Listener]:
        health_port = self._config.health_port
        if health_port is None:
            return (self._worker.listener,)
        health = Listener(self._config.host, health_port, lambda server: None, (), option="--health-port")
        return (self._worker.listener, health)

    async def start(self, running: Running) -> None:
        host = self._config.advertised_host  # a wrong one shows before the model is loaded
        endpoint = host_and_port(host, running.ports[0])

        def on_fault(fault: BaseException) -> None:
            logger.critical("the worker failed, the process exits: %s", fault)
            self._lost = True
            running.stop(exit_code=1)

        if self._config.cluster_secret is None and self._config.internal_tls is None:
            who = "process of this machine" if is_loopback(self._config.host) else "host that reaches it"
            logger.warning("no secret: every %s may use this worker (BATON_SECRET_FILE, --internal-tls-ca)", who)
        running.may_end_at_once = True
        await self._worker.start(on_fault)
        running.may_end_at_once = False
        running.watchdog.watch("engine", lambda: self._worker.turns)
        self._reports = asyncio.create_task(self._report(), name="reports")
        end_on_error(self._reports, on_fault)
        registry = open_registry(self._config.redis_url, self._config.namespace, self._config.cluster_secret)
        if registry is not None:
            record = WorkerRecord(
                self._config.worker_id,
                self._worker.role,
                endpoint,
                fingerprint=self._worker.fingerprint.hex(),
                **asdict(OWN),
            )
            self._registration = Registration(registry, record, self._epoch, lambda: running.stop(exit_code=1))
            await self._registration.start()
        if self._registration is None:
            await running.health.set_serving(True)
        else:
            serving = self._serve_once(self._registration.announced, running)
            self._serving = asyncio.create_task(serving, name="serving")
            end_on_error(self._serving, on_fault)
        logger.info("%s serves %s at %s", self._config.worker_id, self._config.model_name, endpoint)

    async def _serve_once(self, announced: asyncio.Event, running: Running) -> None:
        """A worker that routers cannot find serves nobody. One that they know stays healthy while Redis is away."""
        await announced.wait()
        await running.health.set_serving(True)

    def announce(self, epoch: Epoch) -> None:
        """The worker serves in another role, with that epoch: the next renewal announces it."""
        self._epoch = epoch
        if self._registration is not None:
            self._registration.announce_as(replace(self._registration.record, role=self._worker.role), epoch)

    async def drain(self) -> None:
        """Refuse new work and return when accepted work is done. A lost worker reports nothing: routers must see it
        die.
        """
        if self._lost:
            return
        self._worker.begin_drain()
        while self._worker.busy and not self._lost:  # noqa: ASYNC110 -- the table has no event
            await asyncio.sleep(DRAIN_POLL_S)

    async def stop(self) -> None:
        try:
            if self._registration is not None:
                await self._registration.close()
        finally:
            for task in (self._reports, self._serving):
                if task is not None:
                    task.cancel()
            await self._worker.stop()

    async def _report(self) -> None:
        while True:
            self._worker.report()
            await asyncio.sleep(self._config.report_period_s)
