"""One role of a worker process: what prefill and decode have alike of servers, transfers, start and stop."""

import asyncio
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from baton.engine.kv_cache.block_pool import CacheChanges
from baton.engine.prepare import PreparedModel
from baton.engine.runner.loop import EngineLoop, OutcomeHandler
from baton.engine.runner.runner import Runner
from baton.engine.runner.step_records import StepRecord
from baton.engine.scheduler.sequences import PromptComputed, SchedulerOutcome, TokenMade
from baton.kvtransfer.cuda_ipc import COPY_TIMEOUT_S
from baton.kvtransfer.puller import PullThread
from baton.kvtransfer.transport import CopyStuck
from baton.process.registry.membership import Epoch
from baton.process.registry.worker_record import WorkerRole
from baton.process.security.proofs import ProofCheck
from baton.process.serving.grpc_options import INTERNAL_SERVER_OPTIONS
from baton.process.serving.server import Listener
from baton.process.serving.watchdog import end_process
from baton.process.telemetry.spans import open_telemetry
from baton.process.worker_config import WorkerConfig
from baton.process.worker_process import end_on_error
from baton.protos import (
    kv_transfer_pb2,
    kv_transfer_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    timeline_pb2,
    timeline_pb2_grpc,
    versions_pb2,
)
from baton.versions import OWN
from baton.worker.at_rest.checker import CachedBlocks
from baton.worker.host import EngineHost
from baton.worker.service import Drain, SessionService
from baton.worker.tier.prefetch import Prefetcher
from baton.worker.tier.restorer import EngineView
from baton.worker.timeline import TimelineServicer
from baton.worker.transfer.hand_over import BlockTaker, Leaving, hand_over
from baton.worker.transfer.peers import Peers
from baton.worker.transfer.reader import TransferReader
from baton.worker.transfer.source import TransferSource
from baton.worker.transfer.wire import versions_message
from baton.worker.wire import groups_to_wire

logger = logging.getLogger(__name__)
FaultHandler = Callable[[BaseException], None]
STOP_TIMEOUT_S = 5.0
TOMBSTONE_S = 60.0  # longer than any command of a request or a fetch may trail behind
SERVICE_NAMES = (
    session_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name,
    kv_transfer_pb2.DESCRIPTOR.services_by_name["KvTransferService"].full_name,
    timeline_pb2.DESCRIPTOR.services_by_name["TimelineService"].full_name,
)


def end_stuck(stuck: CopyStuck) -> None:
    """Ends the process, whose device may write into blocks of its pool at any later time."""
    end_process(str(stuck), COPY_TIMEOUT_S)


class ServedWorker(ABC):
    """Base of the workers that `service.worker_process` runs."""

    on_role: Callable[[Epoch], None] = staticmethod(lambda epoch: None)
    """Called with its epoch when another role serves."""

    def __init__(self, config: WorkerConfig, prepared: PreparedModel) -> None:
        self._prepared = prepared
        self._address = config

    @abstractmethod
    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicers of SERVICE_NAMES."""

    @property
    def listener(self) -> Listener:
        config = self._address
        options, tls = INTERNAL_SERVER_OPTIONS, config.internal_tls
        proofs = None if config.cluster_secret is None else ProofCheck(config.cluster_secret)
        return Listener(config.host, config.port, self.register, SERVICE_NAMES, options=options, tls=tls, proofs=proofs)

    @property
    def fingerprint(self) -> bytes:
        return self._prepared.fingerprint


class StepFile:
    """For measurements from outside, a line for each step is appended to a file: `started ended tokens`.

    Seconds on the machine's monotonic clock, and tokens of answers.
    """

    def __init__(self, path: Path) -> None:
        """Raises: OSError where it cannot be written."""
        self._lines = path.open("a", buffering=1)  # a reader finds whole lines

    def recording(self, handler: OutcomeHandler) -> OutcomeHandler:
        def handle(outcomes: Sequence[SchedulerOutcome], step: StepRecord) -> None:
            tokens = sum(map(_tokens_made, outcomes))
            self._lines.write(f"{step.started:.6f} {step.ended:.6f} {tokens}\n")
            handler(outcomes, step)

        return handle

    def close(self) -> None:
        self._lines.close()


def _tokens_made(outcome: SchedulerOutcome) -> int:
    """Of answers."""
    if isinstance(outcome, PromptComputed):
        return len(outcome.first or ())
    return isinstance(outcome, TokenMade)


class RoleWorker(ServedWorker):
    """A `service.worker_process.Worker`: owns the engine's thread and both servicers, and the host unless given one."""

    role: WorkerRole
    tier_settle_s: float
    """How long blocks wait before they are written to files: see `TierWriter.attach`."""

    def __init__(
        self,
        config: WorkerConfig,
        prepared: PreparedModel,
        host: EngineHost,
        service: SessionService[Any],
        transfers: TransferSource,
        pulls: PullThread,
        step_file: Path | None,
        owns_host: bool,
    ) -> None:
        super().__init__(config, prepared)
        memory = host.memory
        self._host, self._owns_host = host, owns_host
        self._service = service
        self.drain = Drain(service)
        self._transfers = transfers
        self._peers = Peers(
            memory.description,
            memory.storage,
            pulls,
            config.transport,
            config.pair_timeout_s,
            memory.groups,
            memory.nixl,
            config.internal_tls,
            memory.copies,
            config.cluster_secret,
        )
        self._timeline = TimelineServicer(service.log)
        self._telemetry = open_telemetry(f"{self.role.value}_worker", config.collector, config.trace_file)
        service.trace_to(self._telemetry)
        self._steps = None if step_file is None else StepFile(step_file)
        self._running: EngineLoop | None = None
        self._sweep: asyncio.Task[None] | None = None
        self._prefetches: asyncio.Task[None] | None = None  # with files below the pool
        self._handing_over: asyncio.Task[None] | None = None  # sessions, since the process ends

    @abstractmethod
    def _make_loop(self, runner: Runner, on_fault: FaultHandler) -> EngineLoop:
        """The engine of this role, not started."""

    @abstractmethod
    def _attach(self) -> None:
        """The engine is warm: requests may come."""

    @abstractmethod
    def _compute_tokens_per_s(self) -> float | None:
        """Prompt tokens, as measured; None: not known yet."""

    def _on_cache(self, changes: CacheChanges) -> None:
        """For routers, for what is compared at rest, and for the files below the pool."""
        self._service.cache.on_changes(changes)
        if self._host.at_rest is not None:
            self._host.at_rest.on_changes(changes)
        if self._host.tier is not None:
            self._host.tier.offer(changes.stored)

    @abstractmethod
    async def _end_pulls(self) -> None:
        """Ends the copies from other workers that are under way."""

    @property
    def busy(self) -> bool:
        handing_over = self._handing_over is not None and not self._handing_over.done()
        return self.drain.busy or handing_over

    @property
    def turns(self) -> int | None:
        return None if self._running is None else self._running.turns

    def register(self, server: grpc.aio.Server) -> None:
        session_pb2_grpc.add_SessionServiceServicer_to_server(self._service, server)
        kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(self._transfers, server)
        timeline_pb2_grpc.add_TimelineServiceServicer_to_server(self._timeline, server)

    async def start(self, on_fault: FaultHandler) -> None:
        on_fault = self._service.breaks(on_fault)
        runner = await self._host.load(on_fault)
        self._running = loop = self._make_loop(runner, on_fault)
        await loop.start()
        if self._host.adapters is not None:
            self._service.keep_adapters(self._host.adapter_table, self._host.adapters, loop, on_fault)
        if self._host.at_rest is not None:
            self._host.at_rest.attach(CachedBlocks(loop, self._service.cache.knows))
            self._service.at_rest = self._host.at_rest
            self._transfers.compare = self._service.compare_cached
        if self._host.tier is not None:
            engine = EngineView(loop, self._service.cache.knows, self._compute_tokens_per_s)
            self._host.tier.attach(engine, self.tier_settle_s)
            self._service.tier = self._host.tier
            self._prefetches = asyncio.create_task(Prefetcher(loop, self._host.tier.restorer).run(), name="prefetch")
            end_on_error(self._prefetches, on_fault)
        self._service.taker = BlockTaker(loop, TransferReader(self._peers))
        self._attach()
        self._timeline.attach(loop)
        self._sweep = asyncio.create_task(self._transfers.sweep(), name="leases")
        end_on_error(self._sweep, on_fault)

    def report(self) -> None:
        self._service.tell_files()
        self._service.report()

    def begin_drain(self) -> None:
        """The process ends. What it keeps for sessions goes to another worker, unless it is in files."""
        self.drain.begin()
        loop, tier = self._running, self._host.tier
        is_in_files = tier is not None and tier.outlives_process
        if loop is not None and not is_in_files and self._handing_over is None:
            leaving = Leaving(
                loop.kept, self._service.offer, lambda: self.drain.busy, lambda: self._transfers.cached_reads > 0
            )
            self._handing_over = asyncio.create_task(hand_over(leaving), name="hand over")

    async def stop(self) -> None:
        """Sessions first, whose requests go with them; then copies and links; the engine and its memory last."""
        await self._service.close()
        self._transfers.close()
        if self._sweep is not None:
            self._sweep.cancel()
        for task in (self._handing_over, self._prefetches):
            if task is not None:
                task.cancel()
        if self._service.taker is not None:
            await self._service.taker.close()
        if self._service.adapters is not None:
            await self._service.adapters.close()
        await self._end_pulls()
        await self._peers.close()
        await self._transfers.end_groups()
        if self._host.tier is not None:
            await self._host.tier.detach()
        if self._host.at_rest is not None:
            await self._host.at_rest.detach()
        if self._running is not None and not await asyncio.to_thread(self._running.stop, STOP_TIMEOUT_S):
            logger.warning("the engine did not stop within %g s", STOP_TIMEOUT_S)
        if self._steps is not None:
            self._steps.close()
        await asyncio.to_thread(self._telemetry.close)
        if self._owns_host:
            await self._host.close()


def worker_info(
    config: WorkerConfig, prepared: PreparedModel, role: "session_pb2.Role", pool_id: bytes, total_slots: int = 0
) -> session_pb2.WorkerInfo:
    """The worker as it introduces itself to routers. `total_slots`: 0 for a role without a batch of answers."""
    return session_pb2.WorkerInfo(
        worker_id=config.worker_id,
        role=role,
        pid=os.getpid(),
        fingerprint=prepared.fingerprint,
        model=session_pb2.ModelInfo(
            name=config.model_name,
            path=str(config.model.resolve()),
            max_model_len=prepared.max_model_len,
            vocab_size=prepared.config.vocab_size,
            dtype=prepared.dtype_name,
            block_size=prepared.layout.block_tokens,
            makes_no_answers=not prepared.config.makes_answers,
            block_groups=groups_to_wire(prepared.layout.groups),
        ),
        total_blocks=prepared.total_blocks,
        pool_id=pool_id,
        total_slots=total_slots,
        arithmetic=prepared.arithmetic,
        versions=versions_message(OWN),
        kv=versions_pb2.KvContent(checkpoint=prepared.checkpoint, layout=prepared.kv_description),
    )
