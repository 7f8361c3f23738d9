"""The parts of a worker process that stay when its role changes: device, weights, runner on all ranks, KV pool."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from baton.engine.drafting.draft_model import DraftModel, draft_options, load_draft_model
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.memory import LargestStep, prepare_with_spare_memory
from baton.engine.lora.adapters import AdapterSet
from baton.engine.lora.files import adapter_digest, read_adapter
from baton.engine.parallel.wire import RankOptions
from baton.engine.prepare import ModelOptions, PreparedModel, prepare_model
from baton.engine.runner.runner import Runner
from baton.engine.runner.thread_preparation import CoreUse
from baton.engine.sampling.constraint import Grammars
from baton.protos import session_pb2
from baton.service.registry.worker_record import AdapterFolder
from baton.service.worker_config import WorkerConfig
from baton.worker.config import DecodeConfig
from baton.worker.tier.tier import open_tier
from baton.worker.transfer.pool import PoolMemory, TransferOptions, make_pool
from baton.worker.transfer.rank import RANK_MODULE

logger = logging.getLogger(__name__)


def gpu_id(device: torch.device) -> str:
    """Its UUID; empty on a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def mark_busy(core_use: Path | None) -> Callable[[bool], None]:
    """For the engine's thread: it reports in that file when it computes. Raises: OSError."""
    return (lambda busy: None) if core_use is None else CoreUse(core_use).mark


def describe_adapters(adapters: Sequence[AdapterFolder]) -> list[session_pb2.Adapter]:
    """For WorkerInfo. Reads the files. Raises: ModelError."""
    return [session_pb2.Adapter(name=each.name, digest=adapter_digest(each.folder)) for each in adapters]


def adapter_number(worker: session_pb2.WorkerInfo, name: str) -> int:
    """The engine's number of the adapter of that name; 0 for an empty name. Raises: ValueError."""
    if not name:
        return 0
    for number, adapter in enumerate(worker.adapters, start=1):
        if adapter.name == name:
            return number
    raise ValueError(f"there is no adapter {name!r} here")


def prepare(config: WorkerConfig, step: LargestStep, nice: int = 0) -> PreparedModel:
    """Blocks. With `--kv-memory auto` on a GPU the weights are loaded to find how much memory is left.

    `step`: the largest that this worker computes. `nice`: how far processes of further ranks stand back. Raises:
    ModelError, RankLost.
    """
    kv_bytes = config.kv_memory_bytes
    asked = ModelOptions(
        config.model,
        torch.device(config.device),
        config.dtype,
        config.block_size,
        kv_bytes or 0,
        config.max_model_len,
        config.kv_cache_dtype,
        config.quantize,
        config.tensor_parallel,
        None if config.cores is None else tuple(sorted(config.cores)),
        config.prefill_attention,
    )
    if isinstance(config, DecodeConfig) and config.draft_model is not None:
        asked = draft_options(asked, config.draft_model, int(config.draft_kv_memory))
    if kv_bytes is not None:
        return prepare_model(asked)
    adapters = AdapterSet() if config.adapter else None
    ranks = RankOptions(entry=RANK_MODULE, nice=nice)
    return prepare_with_spare_memory(asked, step, config.gpu_memory_utilization, adapters, ranks=ranks)


def load_runner(
    prepared: PreparedModel,
    memory: PoolMemory,
    adapters: Sequence[AdapterFolder],
    host_slots: int = 0,
    nice: int = 0,
    decode_rows: int = 0,
) -> Runner:
    """The model and its adapters, numbered from 1 in their order. Blocks. Raises: ModelError, RankLost.

    `host_slots`: blocks of host memory that plans may swap to. `nice`: how far the other ranks' processes stand back.
    `decode_rows`: sequences of a decode step at most, where such steps may be recorded.
    When it returns, no process can map the pool to write it any more.
    """
    loaded = prepared.adapters or (AdapterSet() if adapters else None)
    runner = prepared.load(
        memory.first_part,
        progress=False,
        adapters=loaded,
        host_slots=host_slots,
        ranks=memory.rank_options(nice),
        decode_rows=decode_rows,
    )
    memory.seal()
    if loaded is not None:
        for each in adapters:
            loaded.add(each.name, read_adapter(each.folder))
    return runner


def watch_ranks(runner: Runner, on_fault: Callable[[BaseException], None]) -> None:
    """`on_fault` is called on this event loop, at once, when another rank has ended: the worker cannot continue."""
    if runner.other_ranks is not None:
        events = asyncio.get_running_loop()
        runner.other_ranks.watch(lambda lost: _post(events, on_fault, lost))


def _post(events: asyncio.AbstractEventLoop, function: Callable[[BaseException], None], lost: BaseException) -> None:
    events.call_soon_threadsafe(function, lost)


class EngineHost:
    """Closed by its maker, after the last step of the last role."""

    def __init__(
        self,
        config: WorkerConfig,
        prepared: PreparedModel,
        transfers: TransferOptions,
        host_slots: int = 0,
        nice: int = 0,
        decode_rows: int = 0,
    ) -> None:
        """For `host_slots`, `nice` and `decode_rows` see `load_runner`."""
        self.prepared = prepared
        self.memory = make_pool(prepared, transfers)
        self.blocks = BlockPool(prepared.total_blocks)
        self.tier = open_tier(config, prepared, self.memory)
        model = prepared.config
        self.grammars = Grammars(prepared.options.folder, model.vocab_size, model.eos_token_ids)
        self.used = False  # an engine's thread has warmed the runner up: it must not write to the pool again
        self._config = config
        self._host_slots = host_slots
        self._nice = nice
        self._decode_rows = decode_rows
        self._runner: Runner | None = None
        self.draft: DraftModel | None = None
        """Where the configuration has one, once loaded."""

    async def load(self, on_fault: Callable[[BaseException], None]) -> Runner:
        """The model, loaded the first time. Raises: ModelError, RankLost."""
        if self._runner is None:
            if self.tier is not None:
                self.tier.start()
            await asyncio.to_thread(self.memory.back)
            await asyncio.to_thread(self.grammars.prepare)
            self._runner = await asyncio.to_thread(
                load_runner,
                self.prepared,
                self.memory,
                self._config.adapter,
                self._host_slots,
                nice=self._nice,
                decode_rows=self._decode_rows,
            )
            self.draft = await asyncio.to_thread(load_draft_model, self.prepared, self._decode_rows)
            watch_ranks(self._runner, on_fault)
            if self.tier is not None:
                await self.tier.opened()
        return self._runner

    def pass_on(self) -> None:
        """A role has ended here and another will follow. Cached blocks stay; blocks that are still held are freed."""
        self.used = True
        held = self.blocks.counts.held
        if held:
            logger.warning("%d blocks were still in use at the change of role; the prefix cache is dropped", held)
            self.blocks = BlockPool(self.prepared.total_blocks)

    async def close(self) -> None:
        if self._runner is not None:
            await asyncio.to_thread(self._runner.close)
        if self.tier is not None:
            await self.tier.close()
        self.grammars.close()
        self.memory.close()
