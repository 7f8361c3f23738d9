"""Puts a prefill worker together: checkpoint, pool, engine, transfers and sessions."""

import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Callable

import grpc
import torch

from engine.check_kernels import ForeignKernelsError, require_own_kernels
from engine.model_config import ModelError
from engine.pages import BlockPool
from engine.prefill_scheduler import PrefillScheduler
from engine.prepare import ModelOptions, PreparedModel, prepare_model, thread_preparation
from kvtransfer.description import POOL_ID_BYTES, PoolDescription, host_id
from kvtransfer.errors import SharedMemoryUnavailable
from kvtransfer.memory import SharedPool
from kvtransfer.source import SourceTable
from prefill_worker.config import PrefillConfig
from prefill_worker.loop import PrefillLoop
from prefill_worker.service import PrefillService
from protos import kv_transfer_pb2, kv_transfer_pb2_grpc, session_pb2, session_pb2_grpc
from service.affinity import pin_process
from service.grpc_options import INTERNAL_SERVER_OPTIONS
from service.logs import configure_logging
from service.server import Listener, run, serve
from service.worker_process import WorkerProcess, end_on_error, take_worker_epoch
from service.worker_record import WorkerRole
from worker.transfer_source import TransferSource

logger = logging.getLogger(__name__)
WRONG_CONFIGURATION = 2
STOP_TIMEOUT_S = 5.0
TOMBSTONE_S = 60.0  # longer than any command of a request may trail behind
SWITCH_INTERVAL_S = 0.0005  # the engine's thread must not wait 5 ms for an event loop that is busy
SERVICE_NAMES = (
    session_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name,
    kv_transfer_pb2.DESCRIPTOR.services_by_name["KvTransferService"].full_name,
)


class PrefillWorker:
    """A `service.worker_process.Worker`: owns the pool, the engine's thread and both servicers."""

    role = WorkerRole.PREFILL

    def __init__(self, config: PrefillConfig, prepared: PreparedModel, epoch: int) -> None:
        self._config = config
        self._prepared = prepared
        self._shared_pool = shared_pool(config, prepared)
        self._storage = self._shared_pool.tensor if self._shared_pool else private_pool(prepared)
        self._service = PrefillService(worker_info(config, prepared), epoch, config.session_grace_s)
        self._transfers = TransferSource(
            SourceTable(config.lease_s, config.park_s, TOMBSTONE_S),
            PoolDescription(
                prepared.fingerprint,
                prepared.layout.block_bytes,
                prepared.total_blocks,
                host_id(),
                secrets.token_bytes(POOL_ID_BYTES),
                self._shared_pool.handle if self._shared_pool else None,
            ),
            self._storage,
            self._service.on_transfer_ended,
        )
        self._loop: PrefillLoop | None = None
        self._sweep: asyncio.Task[None] | None = None

    @property
    def listener(self) -> Listener:
        config = self._config
        return Listener(config.host, config.port, self._register, SERVICE_NAMES, options=INTERNAL_SERVER_OPTIONS)

    @property
    def fingerprint(self) -> bytes:
        return self._prepared.fingerprint

    @property
    def busy(self) -> bool:
        return self._service.busy

    def _register(self, server: grpc.aio.Server) -> None:
        session_pb2_grpc.add_SessionServiceServicer_to_server(self._service, server)
        kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(self._transfers, server)

    async def start(self, on_fault: Callable[[BaseException], None]) -> None:
        runner = await asyncio.to_thread(self._prepared.load, self._storage, progress=False)
        pool = BlockPool(self._prepared.total_blocks)
        scheduler = PrefillScheduler(pool, self._config.block_size, self._config.chunk_tokens)
        prepare = thread_preparation(self._config.cores, self._prepared.options.device, runner)
        self._loop = PrefillLoop(runner, scheduler, self._service.on_progress, on_fault, prepare)
        await self._loop.start()
        self._service.attach(self._loop, self._transfers)
        self._sweep = asyncio.create_task(self._transfers.sweep(), name="leases")
        end_on_error(self._sweep, on_fault)

    def report(self) -> None:
        self._service.report()

    def begin_drain(self) -> None:
        self._service.draining = True

    async def stop(self) -> None:
        """Sessions first, whose prompts go with them; then the readers; the engine and its memory last."""
        await self._service.close()
        self._transfers.close()
        if self._sweep is not None:
            self._sweep.cancel()
        if self._loop is not None and not await asyncio.to_thread(self._loop.stop, STOP_TIMEOUT_S):
            logger.warning("the engine did not end within %g s", STOP_TIMEOUT_S)
        if self._shared_pool is not None:
            self._shared_pool.close()


def shared_pool(config: PrefillConfig, prepared: PreparedModel) -> SharedPool | None:
    """A pool that peers may map, where that is wanted and possible."""
    if config.device != "cpu" or config.transport == "grpc":
        return None
    try:
        return SharedPool.create(prepared.pool_bytes)
    except SharedMemoryUnavailable as error:
        if config.transport == "shared_memory":
            raise
        logger.warning("KV will leave over grpc, the slow way: %s", error)
        return None


def private_pool(prepared: PreparedModel) -> torch.Tensor:
    """A pool that no other process can map."""
    return torch.zeros(prepared.pool_bytes, dtype=torch.uint8, device=prepared.options.device)


def worker_info(config: PrefillConfig, prepared: PreparedModel) -> session_pb2.WorkerInfo:
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
    )


def main(config: PrefillConfig) -> int:
    """Returns the exit code: 2 for what another attempt would not change."""
    configure_logging(config.worker_id, config.log_format, config.log_level)
    try:
        require_own_kernels()
        return _run(config)
    except (ForeignKernelsError, ModelError) as error:
        logger.critical("%s", error)
        return WRONG_CONFIGURATION


def _run(config: PrefillConfig) -> int:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if config.cores is not None:
        pin_process(config.cores)
    return run(_main(config))


async def _main(config: PrefillConfig) -> int:
    options = ModelOptions(
        config.model,
        torch.device(config.device),
        config.dtype,
        config.block_size,
        int(config.kv_memory),
        config.max_model_len,
    )
    prepared = await asyncio.to_thread(prepare_model, options)
    logger.info("%s", prepared)
    epoch = await take_worker_epoch(config)
    return await serve(WorkerProcess(config, PrefillWorker(config, prepared, epoch), epoch))
