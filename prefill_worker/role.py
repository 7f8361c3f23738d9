"""Prefill role: the engine, blocks that others read, blocks fetched from others, and the session service."""

from functools import partial

from baton.engine.config.model_config import EncoderConfig
from baton.engine.kv_cache.memory import LargestStep
from baton.engine.prepare import PreparedModel
from baton.engine.runner.core_use import CoreUse, SpareCores
from baton.engine.runner.engine import Engine
from baton.engine.runner.loop import EngineLoop, OutcomeHandler
from baton.engine.runner.sharing import DeviceShare, PrefillThrottle
from baton.engine.runner.thread_preparation import thread_preparation
from baton.engine.scheduler.budget import StepBudget
from baton.engine.scheduler.scheduler import Scheduler
from baton.kvtransfer.source import SourceTable
from baton.prefill_worker.config import PrefillConfig
from baton.prefill_worker.fetch import FetchOptions, PrefillRate, PrefixFetcher
from baton.prefill_worker.service import PrefillService
from baton.process.registry.worker_record import WorkerRole
from baton.protos import session_pb2
from baton.worker.host import EngineHost, gpu_id
from baton.worker.process import PROMPTS_AT_ONCE, run_worker
from baton.worker.role import TOMBSTONE_S, RoleContext, ServingRole, worker_info
from baton.worker.served import ServedWorker
from baton.worker.service import Drain
from baton.worker.transfer.pool import make_host
from baton.worker.transfer.source import TransferSource


class PrefillRole(ServingRole):
    """Role that computes prompts and keeps their KV until decode workers have read it."""

    role = WorkerRole.PREFILL
    tier_settle_s = 0.0

    def __init__(self, config: PrefillConfig, context: RoleContext) -> None:
        self._config = config
        super().__init__(config, context, config.chunk_file)
        memory, layout = self._host.memory, self._prepared.layout
        self._gpu = gpu_id(self._prepared.options.device)
        self.transfers = TransferSource(
            SourceTable(config.lease_s, config.park_s, TOMBSTONE_S),
            memory.description,
            memory.storage,
            self.loop,
            lambda request_id: self.service.on_transfer_ended(request_id),
            make_host(memory),
            self._observe_slow_down,
            config.checksum_share,
            memory.tcp,
            self._kv.prepare_for_reader,
        )
        self._rate = PrefillRate()
        fetch = FetchOptions(layout.block_tokens, layout.column_bytes, config.fetch_timeout_s, config.fetch == "always")
        self.fetcher = None if config.fetch == "never" else PrefixFetcher(self.loop, self.peers, self._rate, fetch)
        info = worker_info(config, context, session_pb2.ROLE_PREFILL)
        self.service: PrefillService = PrefillService(
            info, context.epoch, config.session_grace_s, self._parts, self.transfers, self._rate, self.fetcher
        )
        self.drain = Drain(self.service)

    def _make_loop(self, on_outcomes: OutcomeHandler) -> EngineLoop:
        config, device, runner = self._config, self._prepared.options.device, self._model.runner
        spare = None
        if config.spare_cores is not None and config.spare_core_use is not None:
            spare = SpareCores.of(config.spare_cores, config.spare_core_use)
        scheduler = Scheduler(
            self._host.blocks,
            self._prepared.layout.block_tokens,
            config.chunk_tokens,
            max_sequences=0,
            budget=StepBudget(),
            tail_tokens=config.tail_tokens if device.type == "cpu" else 0,
            whole_prompts=isinstance(self._prepared.config, EncoderConfig),
            lent_gain=0.0 if spare is None else spare.gain(config.cores),
        )
        ready = thread_preparation(config.cores, device, runner, config.nice, warm=self._host.used, spare=spare)
        throttle = PrefillThrottle(DeviceShare(config.chunk_tokens, config.decode_slow_down))
        engine = Engine(runner, scheduler, throttle, spare)
        cores = None if config.core_use is None else CoreUse(config.core_use)
        return EngineLoop(engine, on_outcomes, self._on_fault, ready, self._on_cache, cores)

    def _compute_tokens_per_s(self) -> float | None:
        return self._rate.tokens_per_s

    def _observe_slow_down(self, gpu: str, slow_down: float) -> None:
        if gpu == self._gpu:
            self.loop.observe_slow_down(slow_down)

    async def _end_pulls(self) -> None:
        if self.fetcher is not None:
            await self.fetcher.close()


def make_worker(config: PrefillConfig, prepared: PreparedModel, epoch: int) -> ServedWorker:
    """Build a prefill worker."""
    host = EngineHost(config, prepared, nice=config.nice)
    return ServedWorker(config, host, epoch, WorkerRole.PREFILL, {WorkerRole.PREFILL: partial(PrefillRole, config)})


def main(config: PrefillConfig) -> int:
    """Run a prefill worker and return the exit code: 2 for an error that a restart would not fix."""
    step = LargestStep(config.chunk_tokens, min(config.chunk_tokens, PROMPTS_AT_ONCE))
    return run_worker(config, step, partial(make_worker, config), config.nice)
