"""Puts a prefill worker together: checkpoint, pool, engine, transfers and sessions."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable

import grpc

from engine.check_kernels import ForeignKernelsError, require_own_kernels
from engine.device_share import DeviceShare
from engine.kv_memory import LargestStep
from engine.model_config import ModelError
from engine.parallel.collectives import RankLost
from engine.prefill_scheduler import PrefillScheduler
from engine.prepare import PreparedModel
from engine.thread_preparation import thread_preparation
from kvtransfer.puller import PullThread
from kvtransfer.source import SourceTable
from prefill_worker.config import PrefillConfig
from prefill_worker.fetch import FetchOptions, PrefixFetcher
from prefill_worker.loop import PrefillLoop, ProgressHandler
from prefill_worker.service import PrefillService
from protos import kv_transfer_pb2_grpc, session_pb2, session_pb2_grpc
from service.affinity import pin_process, stand_back
from service.logs import configure_logging
from service.server import run, serve
from service.worker_process import WorkerProcess, end_on_error, take_worker_epoch
from service.worker_record import WorkerRole
from worker.adapters import describe_adapters
from worker.cores import mark_busy, spare_cores
from worker.drain import Drain
from worker.gpu import gpu_id
from worker.host import EngineHost
from worker.model import prepare
from worker.peers import Peers
from worker.pool import TransferOptions, make_host
from worker.served import ServedWorker
from worker.step_file import StepFile
from worker.transfer_source import TransferSource

logger = logging.getLogger(__name__)
LOST, WRONG_CONFIGURATION = 1, 2
STOP_TIMEOUT_S = 5.0
TOMBSTONE_S = 60.0  # longer than any command of a request may trail behind
SWITCH_INTERVAL_S = 0.0005  # the engine's thread must not wait 5 ms for an event loop that is busy
PROMPTS_AT_ONCE = 64  # that end in one step, where memory is measured


class PrefillWorker(ServedWorker):
    """A `service.worker_process.Worker`: owns the engine's thread and both servicers, and the host unless given one."""

    role = WorkerRole.PREFILL

    def __init__(
        self, config: PrefillConfig, prepared: PreparedModel, epoch: int, host: EngineHost | None = None
    ) -> None:
        """`host`: with whose weights and pool; it stays its owner's."""
        super().__init__(config, prepared)
        self._config = config
        self._owns_host = host is None
        self._host = host or EngineHost(config, prepared, transfer_options(config), nice=config.nice)
        self._memory = self._host.memory
        self.service = PrefillService(
            worker_info(config, prepared, self._memory.description.pool_id), epoch, config.session_grace_s
        )
        self.drain = Drain(self.service)
        self._transfers = TransferSource(
            SourceTable(config.lease_s, config.park_s, TOMBSTONE_S),
            self._memory.description,
            self._memory.storage,
            self.service.on_transfer_ended,
            make_host(self._memory),
            self._hear,
            config.checksum_share,
        )
        self._peers = Peers(
            self._memory.description,
            self._memory.storage,
            PullThread(config.transfer_cores),
            config.transport,
            config.pair_timeout_s,
            self._memory.groups,
            self._memory.nixl,
            config.internal_tls,
        )
        self._gpu = gpu_id(prepared.options.device)
        self._steps = None if config.chunk_file is None else StepFile(config.chunk_file)
        self._loop: PrefillLoop | None = None
        self._fetcher: PrefixFetcher | None = None
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
        tail_tokens = self._config.tail_tokens if self._prepared.options.device.type == "cpu" else 0
        scheduler = PrefillScheduler(self._host.blocks, self._config.block_size, self._config.chunk_tokens, tail_tokens)
        device, warm = self._prepared.options.device, self._host.used
        spare = spare_cores(self._config)
        ready = thread_preparation(self._config.cores, device, runner, self._config.nice, warm=warm, spare=spare)
        share = DeviceShare(self._config.chunk_tokens, self._config.decode_slow_down)
        on_progress: ProgressHandler = self.service.on_progress
        if self._steps is not None:
            on_progress = self._steps.recording(on_progress, lambda progress: len(progress.first or ()))
        on_cache, on_busy = self.service.cache.on_changes, mark_busy(self._config)
        self._loop = PrefillLoop(runner, scheduler, on_progress, on_fault, ready, share, on_cache, on_busy)
        await self._loop.start()
        self._fetcher = self._make_fetcher(self._loop)
        self.service.attach(self._loop, self._transfers, self._fetcher, self._host.grammars)
        self._transfers.attach(self._loop)
        self._sweep = asyncio.create_task(self._transfers.sweep(), name="leases")
        end_on_error(self._sweep, on_fault)

    def _make_fetcher(self, loop: PrefillLoop) -> PrefixFetcher | None:
        config = self._config
        if config.fetch == "never":
            return None
        options = FetchOptions(
            config.block_size, self._prepared.layout.block_bytes, config.fetch_timeout_s, config.fetch == "always"
        )
        return PrefixFetcher(loop, self._peers, self.service.rate, options)

    def _hear(self, gpu: str, slow_down: float) -> None:
        if self._loop is not None and gpu == self._gpu:
            self._loop.hear(slow_down)

    def report(self) -> None:
        self.service.report()

    def begin_drain(self) -> None:
        self.drain.begin()

    async def stop(self) -> None:
        """Sessions first, whose prompts go with them; then readers and links; the engine and its memory last."""
        await self.service.close()
        self._transfers.close()
        if self._sweep is not None:
            self._sweep.cancel()
        await self._peers.close()
        await self._transfers.end_groups()
        if self._fetcher is not None:
            await self._fetcher.close()
        if self._loop is not None and not await asyncio.to_thread(self._loop.stop, STOP_TIMEOUT_S):
            logger.warning("the engine did not stop within %g s", STOP_TIMEOUT_S)
        if self._steps is not None:
            self._steps.close()
        if self._owns_host:
            await self._host.close()


def transfer_options(config: PrefillConfig) -> TransferOptions:
    return TransferOptions(config.transport, config.transfer_interface, config.pair_timeout_s)


def worker_info(config: PrefillConfig, prepared: PreparedModel, pool_id: bytes) -> session_pb2.WorkerInfo:
    return session_pb2.WorkerInfo(
        worker_id=config.worker_id,
        role=session_pb2.ROLE_PREFILL,
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
    )


def main(config: PrefillConfig) -> int:
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


def _run(config: PrefillConfig) -> int:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if config.cores is not None:
        # the engine's thread goes back to `cores` alone; the event loop and the copying stay off them where they can
        pin_process(config.cores | (config.transfer_cores or frozenset()))
    if config.nice:
        stand_back(config.nice)
    return run(_main(config))


async def _main(config: PrefillConfig) -> int:
    step = LargestStep(config.chunk_tokens, min(config.chunk_tokens, PROMPTS_AT_ONCE))
    prepared = await asyncio.to_thread(prepare, config, step, config.nice)
    logger.info("%s", prepared)
    epoch = await take_worker_epoch(config)
    return await serve(
        WorkerProcess(config, PrefillWorker(config, prepared, epoch), epoch),
        grace_s=config.drain_s,
        stall_s=config.stall_s,
    )
