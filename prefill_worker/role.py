"""Puts the prefill role together: engine, transfers that others read, blocks fetched from others, sessions."""

from baton.engine.config.model_config import EncoderConfig
from baton.engine.kv_cache.memory import LargestStep
from baton.engine.prepare import PreparedModel
from baton.engine.runner.engine import Engine
from baton.engine.runner.loop import EngineLoop, OutcomeHandler
from baton.engine.runner.runner import Runner
from baton.engine.runner.sharing import DeviceShare, PrefillThrottle
from baton.engine.runner.thread_preparation import SpareCores, thread_preparation
from baton.engine.scheduler.scheduler import Scheduler
from baton.kvtransfer.puller import PullThread
from baton.kvtransfer.source import SourceTable
from baton.prefill_worker.config import PrefillConfig
from baton.prefill_worker.fetch import FetchOptions, PrefixFetcher
from baton.prefill_worker.service import PrefillService
from baton.process.registry.worker_record import WorkerRole
from baton.protos import session_pb2
from baton.worker.host import EngineHost, gpu_id, mark_busy
from baton.worker.process import PROMPTS_AT_ONCE, run_worker
from baton.worker.role import TOMBSTONE_S, FaultHandler, RoleWorker, end_stuck, worker_info
from baton.worker.transfer.pool import TransferOptions, make_host
from baton.worker.transfer.source import TransferSource


class PrefillWorker(RoleWorker):
    """Computes prompts and keeps their KV until decode workers have read it."""

    role = WorkerRole.PREFILL
    tier_settle_s = 0.0

    def __init__(
        self, config: PrefillConfig, prepared: PreparedModel, epoch: int, host: EngineHost | None = None
    ) -> None:
        """`host`: with whose weights and pool; it stays its owner's."""
        self._config = config
        owned = host or EngineHost(config, prepared, TransferOptions.of(config), nice=config.nice)
        memory = owned.memory
        info = worker_info(config, prepared, session_pb2.ROLE_PREFILL, memory.description.pool_id)
        self.service = PrefillService(info, epoch, config.session_grace_s)
        transfers = TransferSource(
            SourceTable(config.lease_s, config.park_s, TOMBSTONE_S),
            memory.description,
            memory.storage,
            self.service.on_transfer_ended,
            make_host(memory),
            self._observe_slow_down,
            config.checksum_share,
            memory.tcp,
        )
        pulls = PullThread(config.transfer_cores, end_stuck, prepared.options.device)
        super().__init__(config, prepared, owned, self.service, transfers, pulls, config.chunk_file, host is None)
        self._gpu = gpu_id(prepared.options.device)
        self._loop: EngineLoop | None = None
        self._fetcher: PrefixFetcher | None = None

    def _make_loop(self, runner: Runner, on_fault: FaultHandler) -> EngineLoop:
        config, device = self._config, self._prepared.options.device
        tail_tokens = config.tail_tokens if device.type == "cpu" else 0
        block_tokens = self._prepared.layout.block_tokens
        scheduler = Scheduler(
            self._host.blocks,
            block_tokens,
            config.chunk_tokens,
            max_sequences=0,
            tail_tokens=tail_tokens,
            whole_prompts=isinstance(self._prepared.config, EncoderConfig),
        )
        spare, warm = None, self._host.used
        if config.spare_cores is not None and config.spare_core_use is not None:
            spare = SpareCores.of(config.spare_cores, config.spare_core_use)
        ready = thread_preparation(config.cores, device, runner, config.nice, warm=warm, spare=spare)
        throttle = PrefillThrottle(DeviceShare(config.chunk_tokens, config.decode_slow_down))
        on_outcomes: OutcomeHandler = self.service.on_outcomes
        if self._steps is not None:
            on_outcomes = self._steps.recording(on_outcomes)
        engine, on_busy = Engine(runner, scheduler, throttle), mark_busy(config.core_use)
        self._loop = EngineLoop(engine, on_outcomes, on_fault, ready, self._on_cache, on_busy)
        return self._loop

    def _attach(self) -> None:
        assert self._loop is not None
        self._fetcher = self._make_fetcher(self._loop)
        self.service.attach(self._loop, self._transfers, self._fetcher, self._host.grammars)
        self._transfers.attach(self._loop, self._service.restore_for_others)

    def _compute_tokens_per_s(self) -> float | None:
        return self.service.rate.tokens_per_s

    def _make_fetcher(self, loop: EngineLoop) -> PrefixFetcher | None:
        config = self._config
        if config.fetch == "never":
            return None
        layout = self._prepared.layout
        options = FetchOptions(
            layout.block_tokens, layout.column_bytes, config.fetch_timeout_s, config.fetch == "always"
        )
        return PrefixFetcher(loop, self._peers, self.service.rate, options)

    def _observe_slow_down(self, gpu: str, slow_down: float) -> None:
        if self._loop is not None and gpu == self._gpu:
            self._loop.observe_slow_down(slow_down)

    async def _end_pulls(self) -> None:
        if self._fetcher is not None:
            await self._fetcher.close()


def main(config: PrefillConfig) -> int:
    """Returns the exit code: 2 for an error that a restart would not fix."""
    step = LargestStep(config.chunk_tokens, min(config.chunk_tokens, PROMPTS_AT_ONCE))
    return run_worker(config, step, lambda prepared, epoch: PrefillWorker(config, prepared, epoch), config.nice)
