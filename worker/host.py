"""Parts of a worker process that outlive a change of role: device, weights, runner on all ranks, KV pool."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from baton.engine.config.model_config import ModelError
from baton.engine.drafting.draft_model import DraftModel, draft_options, load_draft_model
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.memory import LargestStep, prepare_with_spare_memory
from baton.engine.load import device_named
from baton.engine.lora.adapters import AdapterSet
from baton.engine.parallel.wire import RankOptions
from baton.engine.prepare import ModelOptions, PreparedModel, prepare_model
from baton.engine.runner.runner import Runner
from baton.engine.sampling.constraint import Grammars
from baton.kvtransfer.checksum import Checksums
from baton.process.registry.worker_record import AdapterFolder
from baton.text.host.memory import shortage, total_bytes
from baton.worker.adapters.engine import EngineAdapters, EngineWeights
from baton.worker.adapters.table import AdapterKey, AdapterOrigin, AdapterTable
from baton.worker.at_rest.checker import RestChecker
from baton.worker.config import WorkerConfig
from baton.worker.tier.tier import open_tier
from baton.worker.tier.writer import IGNORE_SUMS
from baton.worker.transfer.pool import PoolMemory, make_pool
from baton.worker.transfer.rank import RANK_MODULE

logger = logging.getLogger(__name__)


def gpu_id(device: torch.device) -> str:
    """Return the GPU's UUID; empty on a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def prepare(config: WorkerConfig, step: LargestStep, nice: int = 0) -> PreparedModel:
    """Prepare the model. Blocks. With `--kv-memory auto` on a GPU, load the weights to measure the memory that is left.

    `step`: largest step that this worker may compute. `nice`: nice value of the other ranks' processes. Raises:
    ModelError, RankLost.
    """
    kv_bytes = config.kv_memory_bytes
    asked = ModelOptions(
        config.model,
        device_named(config.device),
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
    asked = replace(asked, speculates=config.speculates)
    if config.draft is not None:
        asked = draft_options(asked, *config.draft)
    if kv_bytes is not None:
        prepared = prepare_model(asked)
        _check_host_memory(config, prepared)
        return prepared
    ranks = RankOptions(entry=RANK_MODULE, nice=nice)
    return prepare_with_spare_memory(asked, step, config.gpu_memory_utilization, AdapterSet(), ranks=ranks)


def _check_host_memory(config: WorkerConfig, prepared: PreparedModel) -> None:
    """Check that host memory suffices before any is allocated. Raises: ModelError, naming the amounts."""
    on_cpu = prepared.options.device.type == "cpu"
    amounts = {
        "kv-memory": prepared.pool_bytes if on_cpu else 0,
        "weights": prepared.weight_bytes if on_cpu else 0,
        "kv-tier-memory": int(config.kv_tier_memory),
        "swap-memory": config.swap_bytes,
    }
    if why := shortage(amounts, total_bytes()):
        raise ModelError(why)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Model with its weights in memory on all ranks."""

    runner: Runner
    adapters: EngineAdapters | None  # None: routers cannot add adapters
    draft: DraftModel | None  # None: no draft model is configured


def _load_runner(
    prepared: PreparedModel, memory: PoolMemory, host_slots: int = 0, nice: int = 0, decode_rows: int = 0
) -> tuple[Runner, EngineAdapters]:
    """Load the model and its adapters. Blocks. Raises: ModelError, RankLost.

    `host_slots`: number of host-memory blocks for swapping. `nice`: nice value of the other ranks' processes.
    `decode_rows`: maximum number of sequences in a decode step that is recorded as a CUDA graph. After the return, no
    other process can map the pool for writing.
    """
    adapters = prepared.adapters or AdapterSet()
    runner = prepared.load(
        memory.first_part,
        progress=False,
        adapters=adapters,
        host_slots=host_slots,
        ranks=memory.rank_options(nice),
        decode_rows=decode_rows,
    )
    memory.seal()
    return runner, EngineAdapters(adapters, runner.other_ranks, EngineWeights(prepared, runner))


def start_adapters(engine: EngineAdapters, folders: Sequence[AdapterFolder], table: AdapterTable) -> None:
    """Load the adapters of `--adapter` and register the model's own weights. Call it before the first step. Blocks.

    Raises: ModelError, RankLost.
    """
    table.add_own_weights(engine.started_weights)
    for each in folders:
        folder = each.folder.resolve()
        read = engine.read(each.name, folder)
        table.add(AdapterKey(each.name, read.digest), engine.add(read), AdapterOrigin.STARTED)


def watch_ranks(runner: Runner, on_fault: Callable[[BaseException], None]) -> None:
    """Call `on_fault` on this event loop when another rank is lost, after which the worker cannot continue."""
    if runner.other_ranks is not None:
        events = asyncio.get_running_loop()
        runner.other_ranks.watch(lambda lost: _post(events, on_fault, lost))


def _post(events: asyncio.AbstractEventLoop, function: Callable[[BaseException], None], lost: BaseException) -> None:
    events.call_soon_threadsafe(function, lost)


def make_rest_checker(config: WorkerConfig, memory: PoolMemory) -> RestChecker | None:
    """Create the checker of cached blocks; None on a GPU, where checksums would delay steps, or if --kv-check-share is
    0.
    """
    if not config.kv_check_share or not isinstance(memory.storage, torch.Tensor) or memory.storage.is_cuda:
        return None
    return RestChecker(
        Checksums(memory.storage, memory.description.shape), config.kv_check_share, config.transfer_cores
    )


class EngineHost:
    """Device, weights and pool of a worker process. Close it after the last step of the last role."""

    def __init__(
        self,
        config: WorkerConfig,
        prepared: PreparedModel,
        host_slots: int = 0,
        nice: int = 0,
        decode_rows: int = 0,
    ) -> None:
        """Allocate the pool. `host_slots`, `nice`, `decode_rows`: see `_load_runner`. Raises: ModelError,
        SharedMemoryUnavailable.
        """
        self.prepared = prepared
        self.memory = make_pool(prepared, config)
        self.blocks = BlockPool(prepared.total_blocks, prepared.layout.groups)
        self.at_rest = make_rest_checker(config, self.memory)
        """Checker of cached blocks; None: they are not checked."""
        on_sums = IGNORE_SUMS
        if self.at_rest is not None and prepared.options.tensor_parallel == 1:
            on_sums = self.at_rest.take_sums  # only one rank: with several, files order a block's parts differently
        with ExitStack() as undo:
            undo.callback(self.memory.close)
            self.tier = open_tier(config, prepared, self.memory, on_sums)
            undo.pop_all()
        model = prepared.config
        self.grammars = Grammars(prepared.options.folder, model.vocab_size, model.eos_token_ids)
        self.used = False  # True once a role has run: later roles skip the warm-up, which overwrites the pool
        self._config = config
        self._host_slots = host_slots
        self._nice = nice
        self._decode_rows = decode_rows
        self._close_runner = ExitStack()
        self._model: LoadedModel | None = None  # None: not loaded yet
        self.adapter_table = AdapterTable()

    async def load(self, on_fault: Callable[[BaseException], None]) -> LoadedModel:
        """Load the model at the first call; later calls return the same model. Raises: ModelError, RankLost."""
        if self._model is None:
            if self.tier is not None:
                self.tier.start()
            await asyncio.to_thread(self.memory.back)
            await asyncio.to_thread(self.grammars.prepare)
            runner, adapters = await asyncio.to_thread(
                _load_runner, self.prepared, self.memory, self._host_slots, self._nice, self._decode_rows
            )
            self._close_runner.callback(runner.close)
            await asyncio.to_thread(start_adapters, adapters, self._config.adapter, self.adapter_table)
            draft = await asyncio.to_thread(load_draft_model, self.prepared, self._decode_rows)
            watch_ranks(runner, on_fault)
            if self.tier is not None:
                await self.tier.opened()
            self._model = LoadedModel(runner, adapters, draft)
        return self._model

    def pass_on(self) -> None:
        """Prepare for the next role. Keep the prefix cache unless blocks are still in use."""
        self.used = True
        held = self.blocks.counts.held
        if held:
            logger.warning("prefix cache dropped: %d blocks were still in use at the change of role", held)
            self.blocks = BlockPool(self.prepared.total_blocks, self.prepared.layout.groups)

    async def close(self) -> None:
        await asyncio.to_thread(self._close_runner.close)
        if self.tier is not None:
            await self.tier.close()
        if self.at_rest is not None:
            self.at_rest.close()
        self.grammars.close()
        self.memory.close()
