"""Puts a decode worker together: checkpoint, pool, engine, pulls and sessions."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable

import grpc

from decode_worker.config import DecodeConfig
from decode_worker.kept import KeptBounds
from decode_worker.loop import DecodeLoop, OutcomeHandler
from decode_worker.service import DecodeService
from engine.check_kernels import ForeignKernelsError, require_own_kernels
from engine.kv_memory import LargestStep
from engine.mixed_scheduler import MixedScheduler
from engine.mixed_state import TokenMade
from engine.model_config import ModelError
from engine.parallel.collectives import RankLost
from engine.prepare import PreparedModel
from engine.step_budget import StepBudget
from engine.swap_space import SwapSpace
from engine.thread_preparation import thread_preparation
from kvtransfer.puller import PullThread
from kvtransfer.source import SourceTable
from protos import kv_transfer_pb2_grpc, session_pb2, session_pb2_grpc
from service.affinity import pin_process
from service.logs import configure_logging
from service.server import run, serve
from service.worker_process import WorkerProcess, end_on_error, take_worker_epoch
from service.worker_record import WorkerRole
from worker.adapters import describe_adapters
from worker.cores import mark_busy
from worker.drain import Drain
from worker.gpu import gpu_id
from worker.host import EngineHost
from worker.model import prepare
from worker.peers import Peers
from worker.pool import TransferOptions, make_host
from worker.served import ServedWorker
from worker.step_file import StepFile
from worker.transfer_reader import TransferReader
from worker.transfer_source import TransferSource

logger = logging.getLogger(__name__)
LOST, WRONG_CONFIGURATION = 1, 2
STOP_TIMEOUT_S = 5.0
HIGH_PRIORITY = -1  # of a CUDA stream: steps of decode come before chunks of a prompt where both wait for a GPU
TOMBSTONE_S = 60.0  # longer than anything of a fetch may trail behind
SWITCH_INTERVAL_S = 0.0005  # the engine's thread must not wait 5 ms for an event loop that is busy


class DecodeWorker(ServedWorker):
    """A `service.worker_process.Worker`: owns the engine's thread, the pull thread and the servicers, and the
    host unless given one.
    """

    role = WorkerRole.DECODE

    def __init__(
        self,
        config: DecodeConfig,
        prepared: PreparedModel,
        epoch: int,
        pulls: PullThread | None = None,
        host: EngineHost | None = None,
    ) -> None:
        """`pulls`: the thread that copies KV; None: one on the configured cores. `host`: the weights and pool to use;
        its owner keeps it.
        """
        super().__init__(config, prepared)
        self._config = config
        self._owns_host = host is None
        self._host = host or make_engine_host(config, prepared)
        self._memory = self._host.memory
        kept = KeptBounds(config.kept_answers, config.kept_tokens)
        info = worker_info(config, prepared, self._memory.description.pool_id)
        self.service = DecodeService(info, epoch, config.session_grace_s, kept)
        self.drain = Drain(self.service)
        self._transfers = TransferSource(
            SourceTable(
                config.lease_s, park_s=0.0, tombstone_s=TOMBSTONE_S
            ),  # nothing is announced, so no reader is parked
            self._memory.description,
            self._memory.storage,
            groups=make_host(self._memory),
            checksum_share=config.checksum_share,
        )
        self._peers = Peers(
            self._memory.description,
            self._memory.storage,
            pulls or PullThread(config.transfer_cores),
            config.transport,
            config.pair_timeout_s,
            self._memory.groups,
            self._memory.nixl,
            config.internal_tls,
        )
        self._reader = TransferReader(self._peers, gpu_id(prepared.options.device), self._slow_down)
        self._steps = None if config.step_file is None else StepFile(config.step_file)
        self._loop: DecodeLoop | None = None
        self._sweep: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        return self.drain.busy

    @property
    def turns(self) -> int | None:
        return None if self._loop is None else self._loop.turns

    def register(self, server: grpc.aio.Server) -> None:
        session_pb2_grpc.add_SessionServiceServicer_to_server(self.service, server)
        kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(self._transfers, server)

    async def start(self, on_fault: Callable[[BaseException], None]) -> None:
        on_fault = self.service.breaks(on_fault)
        runner = await self._host.load(on_fault)
        scheduler = MixedScheduler(
            self._host.blocks,
            self._config.block_size,
            self._config.chunk_tokens,
            self._config.max_sequences,
            StepBudget(None if self._config.tbt_slo_ms is None else self._config.tbt_slo_ms / 1e3),
            SwapSpace(swap_slots(self._config, self._prepared)),
        )
        device, warm = self._prepared.options.device, self._host.used
        ready = thread_preparation(self._config.cores, device, runner, priority=HIGH_PRIORITY, warm=warm)
        on_outcomes: OutcomeHandler = self.service.on_outcomes
        if self._steps is not None:
            on_outcomes = self._steps.recording(on_outcomes, lambda outcome: isinstance(outcome, TokenMade))
        self._loop = DecodeLoop(
            runner, scheduler, on_outcomes, on_fault, ready, self.service.cache.on_changes, mark_busy(self._config)
        )
        await self._loop.start()
        self.service.attach(self._loop, self._reader, self._host.grammars)
        self._transfers.attach(self._loop)
        self._sweep = asyncio.create_task(self._transfers.sweep(), name="leases")
        end_on_error(self._sweep, on_fault)

    def _slow_down(self) -> float:
        return 0.0 if self._loop is None else self._loop.slow_down

    def report(self) -> None:
        self.service.report()

    def begin_drain(self) -> None:
        self.drain.begin()

    async def stop(self) -> None:
        """Sessions first, whose requests and copies go with them; then the links; the engine and its memory last."""
        await self.service.close()
        self._transfers.close()
        if self._sweep is not None:
            self._sweep.cancel()
        await self._reader.close()
        await self._peers.close()
        await self._transfers.end_groups()
        if self._loop is not None and not await asyncio.to_thread(self._loop.stop, STOP_TIMEOUT_S):
            logger.warning("the engine did not stop within %g s", STOP_TIMEOUT_S)
        if self._steps is not None:
            self._steps.close()
        if self._owns_host:
            await self._host.close()


def swap_slots(config: DecodeConfig, prepared: PreparedModel) -> int:
    """Blocks of host memory for KV of preempted sequences."""
    return int(config.swap_memory) // prepared.layout.block_bytes


def make_engine_host(config: DecodeConfig, prepared: PreparedModel) -> EngineHost:
    transfers = TransferOptions(config.transport, config.transfer_interface, config.pair_timeout_s)
    rows = config.max_sequences if config.graphs else 0
    return EngineHost(config, prepared, transfers, swap_slots(config, prepared), decode_rows=rows)


def worker_info(config: DecodeConfig, prepared: PreparedModel, pool_id: bytes) -> session_pb2.WorkerInfo:
    return session_pb2.WorkerInfo(
        worker_id=config.worker_id,
        role=session_pb2.ROLE_DECODE,
        pid=os.getpid(),
        fingerprint=prepared.fingerprint,
        model=session_pb2.ModelInfo(
            name=config.model_name,
            path=str(config.model.resolve()),
            max_model_len=prepared.max_model_len,
            vocab_size=prepared.config.vocab_size,
            dtype=prepared.dtype_name,
            block_size=config.block_size,
        ),
        total_blocks=prepared.total_blocks,
        adapters=describe_adapters(config.adapter),
        pool_id=pool_id,
        total_slots=config.max_sequences,
    )


def main(config: DecodeConfig) -> int:
    """Returns the exit code: 2 for an error that a restart would not fix."""
    configure_logging(config.worker_id, config.log_format, config.log_level)
    try:
        require_own_kernels()
        return _run(config)
    except (ForeignKernelsError, ModelError) as error:
        logger.critical("%s", error)
        return WRONG_CONFIGURATION
    except RankLost as error:
        logger.critical("%s", error)
        return LOST


def _run(config: DecodeConfig) -> int:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if config.cores is not None:
        # the engine's thread goes back to `cores` alone; the event loop and the copying stay off them where they can
        pin_process(config.cores | (config.transfer_cores or frozenset()))
    return run(_main(config))


async def _main(config: DecodeConfig) -> int:
    step = LargestStep(max(config.chunk_tokens, config.max_sequences), config.max_sequences)
    prepared = await asyncio.to_thread(prepare, config, step)
    logger.info("%s", prepared)
    epoch = await take_worker_epoch(config)
    return await serve(
        WorkerProcess(config, DecodeWorker(config, prepared, epoch), epoch),
        grace_s=config.drain_s,
        stall_s=config.stall_s,
    )
