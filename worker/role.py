"""Base of the prefill and the decode role: engine, servicers, transfers, start and stop."""

import asyncio
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from baton.engine.kv_cache.block_pool import CacheChanges
from baton.engine.runner.loop import EngineLoop, OutcomeHandler
from baton.engine.runner.step_records import StepRecord
from baton.engine.scheduler.sequences import PromptComputed, SchedulerOutcome, TokenMade
from baton.kvtransfer.cuda_ipc import COPY_TIMEOUT_S
from baton.kvtransfer.puller import PullThread
from baton.kvtransfer.transport import CopyStuck
from baton.process.registry.worker_record import WorkerRole
from baton.process.serving.watchdog import end_process
from baton.process.telemetry.export import open_telemetry
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
from baton.worker.config import WorkerConfig
from baton.worker.host import EngineHost, LoadedModel
from baton.worker.local_kv import LocalKv
from baton.worker.process import end_on_error
from baton.worker.service import ChangeRole, Drain, FaultHandler, LoadedAdapters, ServiceParts, SessionService
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
STOP_TIMEOUT_S = 5.0
TOMBSTONE_S = 60.0  # how long an ended transfer is remembered; commands for it never arrive later
ROLES = {session_pb2.ROLE_PREFILL: WorkerRole.PREFILL, session_pb2.ROLE_DECODE: WorkerRole.DECODE}
SERVICE_NAMES = (
    session_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name,
    kv_transfer_pb2.DESCRIPTOR.services_by_name["KvTransferService"].full_name,
    timeline_pb2.DESCRIPTOR.services_by_name["TimelineService"].full_name,
)


def end_stuck(stuck: CopyStuck) -> None:
    """End the process because a copy hangs, after which the device may still write into blocks of the pool."""
    end_process(str(stuck), COPY_TIMEOUT_S)


class StepFile:
    """File with one line per step for measurements: `started ended tokens`.

    Times are seconds of the machine's monotonic clock; `tokens` counts answer tokens.
    """

    def __init__(self, path: Path) -> None:
        """Open the file. Raises: OSError."""
        self._lines = path.open("a", buffering=1)  # line-buffered: readers find complete lines

    def recording(self, handler: OutcomeHandler) -> OutcomeHandler:
        def handle(outcomes: Sequence[SchedulerOutcome], step: StepRecord) -> None:
            tokens = sum(map(_tokens_made, outcomes))
            self._lines.write(f"{step.started:.6f} {step.ended:.6f} {tokens}\n")
            handler(outcomes, step)

        return handle

    def close(self) -> None:
        self._lines.close()


def _tokens_made(outcome: SchedulerOutcome) -> int:
    """Return the number of answer tokens in an outcome."""
    if isinstance(outcome, PromptComputed):
        return len(outcome.first or ())
    return isinstance(outcome, TokenMade)


@dataclass(frozen=True, slots=True)
class RoleContext:
    """Parts of a worker process from which a role is built; the process closes them."""

    epoch: int
    host: EngineHost
    model: LoadedModel
    on_fault: FaultHandler
    change_role: ChangeRole | None = None  # None: the role is fixed
    pulls: PullThread | None = None  # None: a new thread on the configured cores


class ServingRole(ABC):
    """Engine, session service and transfers of one role of a worker. Lives on the event loop.

    The engine is constructed before the service, and started last. Its callbacks reach the service through this object.
    """

    role: WorkerRole
    tier_settle_s: float
    """Delay before new blocks are written to files: see `TierWriter.attach`."""
    service: SessionService[Any]
    transfers: TransferSource
    drain: Drain

    def __init__(self, config: WorkerConfig, context: RoleContext, step_file: Path | None) -> None:
        self._prepared, self._host, self._model = context.host.prepared, context.host, context.model
        self._context = context
        memory, device = context.host.memory, context.host.prepared.options.device
        self._steps = None if step_file is None else StepFile(step_file)
        on_outcomes: OutcomeHandler = lambda outcomes, step: self.service.on_outcomes(outcomes, step)  # noqa: E731
        if self._steps is not None:
            on_outcomes = self._steps.recording(on_outcomes)
        self.loop = self._make_loop(on_outcomes)
        self.peers = Peers(
            memory.description,
            memory.storage,
            context.pulls or PullThread(config.transfer_cores, end_stuck, device),
            config.transport,
            config.pair_timeout_s,
            memory.groups,
            memory.nixl,
            config.internal_tls,
            memory.copies,
            config.cluster_secret,
        )
        self._taker = BlockTaker(self.loop, TransferReader(self.peers))
        self._telemetry = open_telemetry(f"{self.role.value}_worker", config.collector, config.trace_file)
        self._kv = LocalKv(context.host.prepared.layout.groups, context.host.tier, context.host.at_rest)
        adapters = context.model.adapters
        self._parts = ServiceParts(
            self.loop,
            context.host.grammars,
            self._kv,
            self._taker,
            None if adapters is None else LoadedAdapters(context.host.adapter_table, adapters, self._on_fault),
            context.change_role,
            self._telemetry,
        )
        self._running = AsyncExitStack()
        self._handing_over: asyncio.Task[None] | None = None  # None: no hand-over has begun

    @abstractmethod
    def _make_loop(self, on_outcomes: OutcomeHandler) -> EngineLoop:
        """Construct the engine of this role without starting it."""

    @abstractmethod
    def _compute_tokens_per_s(self) -> float | None:
        """Return the measured rate of prompt computation; None if it is not measured."""

    @abstractmethod
    async def _end_pulls(self) -> None:
        """Cancel running copies from other workers, and wait until they have ended."""

    def _on_fault(self, fault: BaseException) -> None:
        self.service.broken = True
        self._context.on_fault(fault)

    def _on_cache(self, changes: CacheChanges) -> None:
        """Report changes of the prefix cache to routers, to the checks of cached blocks and to the KV tier."""
        self.service.cache.on_changes(changes)
        if self._host.at_rest is not None:
            self._host.at_rest.on_changes(changes)
        if self._host.tier is not None:
            self._host.tier.offer(changes.stored)

    @property
    def busy(self) -> bool:
        handing_over = self._handing_over is not None and not self._handing_over.done()
        return self.drain.busy or handing_over

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicers of SERVICE_NAMES to `server`."""
        timeline = TimelineServicer(self.service.log, self.loop)
        session_pb2_grpc.add_SessionServiceServicer_to_server(self.service, server)
        kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(self.transfers, server)
        timeline_pb2_grpc.add_TimelineServiceServicer_to_server(timeline, server)

    async def start(self) -> None:
        """Start the engine; return when it is warm. `stop` undoes all steps in reverse order, also after a failure."""
        at_rest, tier, undo = self._host.at_rest, self._host.tier, self._running
        undo.push_async_callback(asyncio.to_thread, self._telemetry.close)
        if self._steps is not None:
            undo.callback(self._steps.close)
        undo.push_async_callback(self._stop_engine)
        if at_rest is not None:
            undo.push_async_callback(at_rest.detach)
        if tier is not None:
            undo.push_async_callback(tier.detach)
        undo.push_async_callback(self.transfers.end_groups)
        undo.push_async_callback(self.peers.close)
        undo.push_async_callback(self._end_pulls)
        undo.push_async_callback(self._taker.close)
        if self.service.adapters is not None:
            undo.push_async_callback(self.service.adapters.close)
        undo.callback(self.transfers.close)
        undo.push_async_callback(self.service.close)
        await self.loop.start()
        if at_rest is not None:
            at_rest.attach(CachedBlocks(self.loop, self.service.cache.knows))
        if tier is not None:
            engine = EngineView(self.loop, self.service.cache.knows, self._compute_tokens_per_s)
            tier.attach(engine, self.tier_settle_s)
            self._run_until_stop(Prefetcher(self.loop, tier.restorer).run(), "prefetch")
        self._run_until_stop(self.transfers.sweep(), "leases")

    def _run_until_stop(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        end_on_error(task, self._on_fault)
        self._running.callback(task.cancel)

    async def _stop_engine(self) -> None:
        if not await asyncio.to_thread(self.loop.stop, STOP_TIMEOUT_S):
            logger.warning("engine still running %g s after the stop; not waiting any longer", STOP_TIMEOUT_S)

    def report(self) -> None:
        self.service.tell_files()
        self.service.report()

    def begin_drain(self) -> None:
        """Drain because the process ends. Hand the KV of user sessions over to other workers, unless a KV tier has
        it in files.
        """
        self.drain.begin()
        tier = self._host.tier
        is_in_files = tier is not None and tier.outlives_process
        if not is_in_files and self._handing_over is None:
            leaving = Leaving(
                self.loop.kept, self.service.offer, lambda: self.drain.busy, lambda: self.transfers.cached_reads > 0
            )
            self._handing_over = asyncio.create_task(hand_over(leaving), name="hand over")
            self._running.callback(self._handing_over.cancel)

    async def stop(self) -> None:
        """Close, in this order: links with their requests, running copies, the engine and its memory."""
        await self._running.aclose()


def worker_info(
    config: WorkerConfig, context: RoleContext, role: "session_pb2.Role", total_slots: int = 0
) -> session_pb2.WorkerInfo:
    """Describe the worker to routers. `total_slots`: number of batch slots; 0 for a role that generates no answers."""
    prepared = context.host.prepared
    return session_pb2.WorkerInfo(
        worker_id=config.worker_id,
        role=role,
        roles=() if context.change_role is None else ROLES,
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
        pool_id=context.host.memory.description.pool_id,
        total_slots=total_slots,
        arithmetic=prepared.arithmetic,
        versions=versions_message(OWN),
        kv=versions_pb2.KvContent(checkpoint=prepared.checkpoint, layout=prepared.kv_description),
    )
