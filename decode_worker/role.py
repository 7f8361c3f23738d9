"""Puts the decode role together: engine, pulls, blocks that others may read, sessions."""

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
from baton.engine.runner.cuda_graphs import DECODE_PRIORITY
from baton.engine.runner.engine import Engine
from baton.engine.runner.loop import EngineLoop, OutcomeHandler
from baton.engine.runner.runner import Runner
from baton.engine.runner.thread_preparation import thread_preparation
from baton.engine.scheduler.budget import StepBudget
from baton.engine.scheduler.drafts import Drafter
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.speculation import Speculation
from baton.kvtransfer.puller import PullThread
from baton.kvtransfer.source import SourceTable
from baton.process.registry.worker_record import WorkerRole
from baton.protos import session_pb2
from baton.worker.host import EngineHost, gpu_id, mark_busy
from baton.worker.process import run_worker
from baton.worker.role import TOMBSTONE_S, FaultHandler, RoleWorker, end_stuck, worker_info
from baton.worker.transfer.pool import TransferOptions, make_host
from baton.worker.transfer.reader import TransferReader
from baton.worker.transfer.source import TransferSource


def _speculation(config: DecodeConfig, drafter: Drafter | None, computes_alike: bool) -> Speculation | None:
    if config.speculate == "off":
        return None
    target_s = None if config.tbt_slo_ms is None else config.tbt_slo_ms / 1e3
    return Speculation(config.speculative_tokens, target_s, drafter, computes_alike)


def _nothing() -> None:
    pass


class DecodeWorker(RoleWorker):
    """Takes over KV and generates tokens for all its sequences at once."""

    role = WorkerRole.DECODE
    tier_settle_s = 1.0  # most prompts come from prefill workers of this machine, which write them

    def __init__(
        self,
        config: DecodeConfig,
        prepared: PreparedModel,
        epoch: int,
        pulls: PullThread | None = None,
        host: EngineHost | None = None,
    ) -> None:
        """`pulls`: the thread that copies KV; None: one on the configured cores. `host`: the weights and pool to use;
        its owner keeps it. Raises: ModelError.
        """
        check_answers(prepared)
        self._config = config
        owned = host or make_engine_host(config, prepared)
        memory = owned.memory
        pool_id, slots = memory.description.pool_id, config.max_sequences
        info = worker_info(config, prepared, session_pb2.ROLE_DECODE, pool_id, slots)
        self.service = DecodeService(
            info, epoch, config.session_grace_s, RetainedBounds(config.kept_answers, config.kept_tokens)
        )
        transfers = TransferSource(
            SourceTable(
                config.lease_s, park_s=0.0, tombstone_s=TOMBSTONE_S
            ),  # nothing is announced: no reader is parked
            memory.description,
            memory.storage,
            groups=make_host(memory),
            checksum_share=config.checksum_share,
            tcp=memory.tcp,
        )
        pulls = pulls or PullThread(config.transfer_cores, end_stuck, prepared.options.device)
        super().__init__(config, prepared, owned, self.service, transfers, pulls, config.step_file, host is None)
        self._reader = TransferReader(self._peers, gpu_id(prepared.options.device), self._slow_down)
        self._loop: EngineLoop | None = None

    def _make_loop(self, runner: Runner, on_fault: FaultHandler) -> EngineLoop:
        config, draft = self._config, self._host.draft
        drafter = None if draft is None else draft.drafter()
        warm_drafts = _nothing if draft is None or drafter is None else partial(draft.warm_up, drafter)
        scheduler = Scheduler(
            self._host.blocks,
            self._prepared.layout.block_tokens,
            config.chunk_tokens,
            config.max_sequences,
            StepBudget(None if config.tbt_slo_ms is None else config.tbt_slo_ms / 1e3),
            SwapSpace(swap_slots(config, self._prepared)),
            speculation=_speculation(config, drafter, not runner.replays_steps),
        )
        device, warm = self._prepared.options.device, self._host.used
        ready = thread_preparation(config.cores, device, runner, priority=DECODE_PRIORITY, warm=warm, then=warm_drafts)
        on_outcomes: OutcomeHandler = self.service.on_outcomes
        if self._steps is not None:
            on_outcomes = self._steps.recording(on_outcomes)
        on_busy = mark_busy(config.core_use)
        self._loop = EngineLoop(Engine(runner, scheduler), on_outcomes, on_fault, ready, self._on_cache, on_busy)
        return self._loop

    def _attach(self) -> None:
        assert self._loop is not None
        self.service.attach(self._loop, self._reader, self._host.grammars)
        self._transfers.attach(self._loop, self._service.restore_for_others)

    def _compute_tokens_per_s(self) -> float | None:
        return None if self._loop is None else self._loop.load.rates.alone_tokens_per_s

    def _slow_down(self) -> float:
        return 0.0 if self._loop is None else self._loop.slow_down

    async def _end_pulls(self) -> None:
        await self._reader.close()


def swap_slots(config: DecodeConfig, prepared: PreparedModel) -> int:
    """Blocks of host memory for KV of preempted sequences: each rank has its part of them."""
    ranks = prepared.options.tensor_parallel
    return most_host_slots(int(config.swap_memory) // ranks, shard_layout(prepared.layout, ranks).block_bytes)


def make_engine_host(config: DecodeConfig, prepared: PreparedModel) -> EngineHost:
    rows = config.max_sequences if config.graphs else 0
    return EngineHost(config, prepared, TransferOptions.of(config), swap_slots(config, prepared), decode_rows=rows)


def main(config: DecodeConfig) -> int:
    """Returns the exit code: 2 for an error that a restart would not fix."""
    step = LargestStep(max(config.chunk_tokens, config.max_sequences), config.max_sequences)
    return run_worker(config, step, lambda prepared, epoch: DecodeWorker(config, prepared, epoch))


def check_answers(prepared: PreparedModel) -> None:
    """Raises: ModelError for a model that only prefill workers serve."""
    if not prepared.config.makes_answers:
        raise ModelError(f"{prepared.config.family}: the model makes no answers; prefill workers alone serve it")
