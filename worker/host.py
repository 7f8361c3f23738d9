"""The parts of a worker process that stay when its role changes: the weights, the KV pool, and its cached blocks."""

import asyncio
import logging
from collections.abc import Callable

from engine.grammars import Grammars
from engine.pages import BlockPool
from engine.prepare import PreparedModel
from engine.runner import Runner
from service.worker_config import WorkerConfig
from worker.pool import TransferOptions, make_pool
from worker.ranks import load_runner, watch_ranks

logger = logging.getLogger(__name__)


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
        model = prepared.config
        self.grammars = Grammars(prepared.options.folder, model.vocab_size, model.eos_token_ids)
        self.used = False  # an engine's thread has warmed the runner up: it must not write to the pool again
        self._config = config
        self._host_slots = host_slots
        self._nice = nice
        self._decode_rows = decode_rows
        self._runner: Runner | None = None

    async def load(self, on_fault: Callable[[BaseException], None]) -> Runner:
        """The model, loaded the first time. Raises: ModelError, RankLost."""
        if self._runner is None:
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
            watch_ranks(self._runner, on_fault)
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
        self.grammars.close()
        self.memory.close()
