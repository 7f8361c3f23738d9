"""Decode role: the engine, reads of KV from other workers, blocks that others may read, and the session service."""

from functools import partial

from baton.decode_worker.config import DecodeConfig
from baton.decode_worker.retained import RetainedBounds
from baton.decode_worker.service import DecodeService
from baton.engine.config.model_config import ModelError
from baton.engine.kv_cache.memory import LargestStep
from baton.engine.kv_cache.sizing import most_host_slots
from baton.engine.kv_cache.swap_space import SwapSpace
from baton.engine.parallel.shard import shard_layout
from baton.engine.prepare import PreparedModel
from baton.engine.runner.core_use import CoreUse
from baton.engine.runner.cuda_graphs import DECODE_PRIORITY
from baton.engine.runner.engine import Engine
from baton.engine.runner.loop import EngineLoop, OutcomeHandler
from baton.engine.runner.thread_preparation import thread_preparation
from baton.engine.scheduler.budget import StepBudget
from baton.engine.scheduler.drafts import Drafter
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.speculation import Speculation
from baton.kvtransfer.source import SourceTable
from baton.process.registry.worker_record import WorkerRole
from baton.protos import session_pb2
from baton.worker.host import EngineHost, gpu_id
from baton.worker.process import run_worker
from baton.worker.role import TOMBSTONE_S, RoleContext, ServingRole, worker_info
from baton.worker.served import ServedWorker
from baton.worker.service import Drain
from baton.worker.transfer.pool import make_host
from baton.worker.transfer.reader import TransferReader
from baton.worker.transfer.source import TransferSource


def _speculation(config: DecodeConfig, drafter: Drafter | None, computes_alike: bool) -> Speculation | None:
    if config.speculate == "off":
        return None
    return Speculation(config.speculative_tokens, config.tbt_slo_ms / 1e3, drafter, computes_alike)


def _nothing() -> None:
    pass


class DecodeRole(ServingRole):
    """Role that receives prompt KV and generates tokens for all sequences in one batch."""

    role = WorkerRole.DECODE
    tier_settle_s = 1.0  # time for prefill workers of this machine to write their prompt blocks first

    def __init__(self, config: DecodeConfig, context: RoleContext) -> None:
        self._config = config
        super().__init__(config, context, config.step_file)
        memory = self._host.memory
        self.transfers = TransferSource(
            SourceTable(config.lease_s, park_s=0.0, tombstone_s=TOMBSTONE_S),  # a decode worker announces no prompts
            memory.description,
            memory.storage,
            self.loop,
            groups=make_host(memory),
            checksum_share=config.checksum_share,
            tcp=memory.tcp,
            prepare_cached=self._kv.prepare_for_reader,
        )
        gpu = gpu_id(self._prepared.options.device)
        self.reader = TransferReader(self.peers, gpu, lambda: self.loop.slow_down)
        info = worker_info(config, context, session_pb2.ROLE_DECODE, config.max_sequences)
        retained = RetainedBounds(config.kept_answers, config.kept_tokens)
        self.service: DecodeService = DecodeService(
            info, context.epoch, config.session_grace_s, self._parts, self.reader, retained, config.tbt_slo_ms / 1e3
        )
        self.drain = Drain(self.service)

    def _make_loop(self, on_outcomes: OutcomeHandler) -> EngineLoop:
        config, draft, runner = self._config, self._model.draft, self._model.runner
        drafter = None if draft is None else draft.drafter()
        warm_drafts = _nothing if draft is None or drafter is None else partial(draft.warm_up, drafter)
        scheduler = Scheduler(
            self._host.blocks,
            self._prepared.layout.block_tokens,
            config.chunk_tokens,
            config.max_sequences,
            StepBudget(),
            SwapSpace(swap_slots(config, self._prepared)),
            speculation=_speculation(config, drafter, not runner.replays_steps),
            tbt_s=0.0 if config.strict_tbt else config.tbt_slo_ms / 1e3,
        )
        device, warm = self._prepared.options.device, self._host.used
        ready = thread_preparation(config.cores, device, runner, priority=DECODE_PRIORITY, warm=warm, then=warm_drafts)
        cores = None if config.core_use is None else CoreUse(config.core_use)
        return EngineLoop(Engine(runner, scheduler), on_outcomes, self._on_fault, ready, self._on_cache, cores)

    def _compute_tokens_per_s(self) -> float | None:
        return self.loop.load.rates.alone_tokens_per_s

    async def _end_pulls(self) -> None:
        await self.reader.close()


def swap_slots(config: DecodeConfig, prepared: PreparedModel) -> int:
    """Return the number of host-memory blocks for KV of preempted sequences, on each rank."""
    ranks = prepared.options.tensor_parallel
    return most_host_slots(int(config.swap_memory) // ranks, shard_layout(prepared.layout, ranks).block_bytes)


def make_worker(config: DecodeConfig, prepared: PreparedModel, epoch: int) -> ServedWorker:
    """Build a decode worker. Raises: ModelError."""
    check_answers(prepared)
    rows = config.max_sequences if config.graphs else 0
    slots = swap_slots(config, prepared)
    host = EngineHost(config, prepared, slots, decode_rows=rows)
    return ServedWorker(config, host, epoch, WorkerRole.DECODE, {WorkerRole.DECODE: partial(DecodeRole, config)})


def main(config: DecodeConfig) -> int:
    """Run a decode worker and return the exit code: 2 for an error that a restart would not fix."""
    step = LargestStep(max(config.chunk_tokens, config.max_sequences), config.max_sequences)
    return run_worker(config, step, partial(make_worker, config))


def check_answers(prepared: PreparedModel) -> None:
    """Check that the model generates answers. Raises: ModelError for a model that only prefill workers serve."""
    if not prepared.config.makes_answers:
        raise ModelError(f"{prepared.config.family}: the model generates no answers; only prefill workers serve it")
