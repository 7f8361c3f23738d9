"""Worker process of any role: prepare the model, announce the worker, report, drain, stop. Independent of protobuf."""

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Protocol

from baton.engine.config.model_config import ModelError
from baton.engine.kv_cache.memory import LargestStep
from baton.engine.on_device import NoMemoryLeft
from baton.engine.parallel.collectives import RankLost
from baton.engine.prepare import PreparedModel
from baton.kvtransfer.transport import SharedMemoryUnavailable
from baton.process.affinity import lower_priority, pin_process
from baton.process.config import log_notices
from baton.process.registry.membership import Epoch, Registration, open_registry, take_epoch
from baton.process.registry.worker_record import WorkerRecord, WorkerRole
from baton.process.serving.addresses import host_and_port, is_loopback
from baton.process.serving.exit_codes import ExitCode
from baton.process.serving.server import Listener, Running, run, serve
from baton.process.telemetry.logs import configure_logging
from baton.versions import OWN
from baton.worker.config import WorkerConfig
from baton.worker.host import prepare
from baton.worker.transfer.pool import prepare_groups

logger = logging.getLogger(__name__)
DRAIN_POLL_S = 0.05
SWITCH_INTERVAL_S = 0.0005  # longest wait of the engine's thread for the GIL while the event loop is busy
PROMPTS_AT_ONCE = 64  # prompts assumed to finish in the largest step, whose memory is measured at start


class Worker(Protocol):
    """Interface through which `WorkerProcess` uses one worker's engine and open requests."""

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
        """Return a counter that increases while the engine makes progress; None without an engine. Thread-safe."""

    async def start(self, on_fault: Callable[[BaseException], None], on_role: Callable[[Epoch], None]) -> None:
        """Load and warm the engine; return when it can serve.

        `on_role` is called with the new epoch each time another role begins to serve.
        """

    def report(self) -> None: ...
    def begin_drain(self) -> None: ...
    async def stop(self) -> None: ...


def end_on_error(task: "asyncio.Task[None]", on_fault: Callable[[BaseException], None]) -> None:
    """Log an error of `task`, which nothing awaits, and pass it to `on_fault`."""

    def ended(task: "asyncio.Task[None]") -> None:
        fault = None if task.cancelled() else task.exception()
        if fault is not None:
            logger.error("%s failed", task.get_name(), exc_info=fault)
            on_fault(fault)

    task.add_done_callback(ended)


async def take_worker_epoch(config: WorkerConfig) -> Epoch:
    """Return a fencing epoch, from Redis if one is configured, else from the clock."""
    registry = open_registry(config.redis_url, config.namespace, config.cluster_secret)
    try:
        return await take_epoch(registry)
    finally:
        if registry is not None:
            await registry.close()


class WorkerProcess:
    """A `process.serving.server.Process` of one worker: announces it, sends its reports, drains it."""

    def __init__(self, config: WorkerConfig, worker: Worker, epoch: Epoch) -> None:
        self._config = config
        self._worker = worker
        self._epoch = epoch
        self._registration: Registration | None = None
        self._reports: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._lost = False  # True once the engine has failed: open requests cannot finish

    @property
    def listeners(self) -> Sequence[Listener]:
        health_port = self._config.health_port
        if health_port is None:
            return (self._worker.listener,)
        health = Listener(self._config.host, health_port, lambda server: None, (), option="--health-port")
        return (self._worker.listener, health)

    async def start(self, running: Running) -> None:
        host = self._config.advertised_host  # read before the model is loaded: an invalid host fails immediately
        endpoint = host_and_port(host, running.ports[0])

        def on_fault(fault: BaseException) -> None:
            logger.critical("worker failed: %s; the process exits", fault)
            self._lost = True
            running.stop(exit_code=1)

        if self._config.cluster_secret is None and self._config.internal_tls is None:
            who = "process of this machine" if is_loopback(self._config.host) else "host that reaches it"
            text = "no secret: every %s may use this worker; set --secret-file (BATON_SECRET_FILE) or --internal-tls-ca"
            logger.warning(text, who)
        running.may_end_at_once = True
        await self._worker.start(on_fault, self.announce)
        running.may_end_at_once = False
        running.watchdog.watch("engine", lambda: self._worker.turns)
        self._reports = asyncio.create_task(self._report(), name="reports")
        end_on_error(self._reports, on_fault)
        registry = open_registry(self._config.redis_url, self._config.namespace, self._config.cluster_secret)
        if registry is None:
            await running.health.set_serving(True)
        else:
            record = WorkerRecord(
                self._config.worker_id,
                self._worker.role,
                endpoint,
                fingerprint=self._worker.fingerprint.hex(),
                **asdict(OWN),
            )
            self._registration = Registration(registry, record, self._epoch, lambda: running.stop(exit_code=1))
            await self._registration.start()
            serving = self._serve_once(self._registration.announced, running)
            self._serving = asyncio.create_task(serving, name="serving")
            end_on_error(self._serving, on_fault)
        logger.info("%s serves %s at %s", self._config.worker_id, self._config.model_name, endpoint)

    async def _serve_once(self, announced: asyncio.Event, running: Running) -> None:
        """Report healthy after the first announcement in Redis; a later outage of Redis does not change that."""
        await announced.wait()
        await running.health.set_serving(True)

    def announce(self, epoch: Epoch) -> None:
        """Announce the worker's present role in Redis under `epoch`, at the next renewal."""
        self._epoch = epoch
        if self._registration is not None:
            self._registration.announce_as(replace(self._registration.record, role=self._worker.role), epoch)

    async def drain(self) -> None:
        """Refuse new requests and return when the accepted ones have finished.

        After an engine failure nothing is drained: routers must see the worker fail, not drain.
        """
        if self._lost:
            return
        self._worker.begin_drain()
        while self._worker.busy and not self._lost:  # noqa: ASYNC110 -- the request table has no event
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


MakeWorker = Callable[[PreparedModel, int], Worker]
"""Factory of a worker from the prepared model and the epoch."""


def run_worker(config: WorkerConfig, step: LargestStep, make_worker: MakeWorker, nice: int = 0) -> int:
    """Run a worker until it stops; return the exit code. `nice`: nice value of the process."""
    configure_logging(config.worker_id, config.log_format, config.log_level)
    log_notices(config)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    prepare_groups(config)
    try:
        return run(_serve(config, step, make_worker, nice))
    except NoMemoryLeft as error:
        logger.critical("%s", error)
        return ExitCode.OUT_OF_MEMORY
    except (ModelError, SharedMemoryUnavailable) as error:
        logger.critical("%s", error)
        return ExitCode.WRONG_CONFIGURATION
    except RankLost as error:
        logger.critical("%s", error)
        return ExitCode.FAILED


async def _serve(config: WorkerConfig, step: LargestStep, make_worker: MakeWorker, nice: int) -> int:
    if config.cores is not None:
        # Later the engine's thread is restricted to `cores`; the event loop and copies prefer the other cores.
        pin_process(config.cores | (config.transfer_cores or frozenset()))
    if nice:
        lower_priority(nice)
    prepared = await asyncio.to_thread(prepare, config, step, nice)
    logger.info("%s", prepared)
    epoch = await take_worker_epoch(config)
    worker = make_worker(prepared, epoch.number)
    process = WorkerProcess(config, worker, epoch)
    return await serve(process, grace_s=config.drain_s, stall_s=config.stall_s, run_id=config.run_id)
