"""KV files of a simulated worker: the real tier, with event-loop callbacks instead of threads."""

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from baton.engine.runner.thread import EngineStopped
from baton.kvtransfer.tier.records import SegmentFormat
from baton.kvtransfer.tier.staging import BlockCopier
from baton.kvtransfer.tier.store import TierStore, least_bytes
from baton.lab.simulation.files.disk import SimulatedDisk
from baton.text.block_groups import BlockGroups
from baton.worker.tier.restorer import RestoreOptions
from baton.worker.tier.tier import KvTier
from baton.worker.tier.writer import IGNORE_SUMS, REFRESH_S, SumListener, TierWriter
from baton.worker.transfer.pool import PoolMemory

Result = TypeVar("Result")
IDENTITY = b"simulated identity, 32 bytes too"
READ_S = 0.002  # longest time of a load on a disk without faults
COPY_S = 0.2  # longest time between watching blocks and copying them
PAUSE_S = 0.01


@dataclass(frozen=True, slots=True)
class TierShape:
    """Settings of every worker's KV tier in a world."""

    blocks: int  # approximate capacity of the files
    always: bool  # whether blocks are loaded even if computing them seems cheaper


class SimulatedTierWriter(TierWriter):
    """KV tier writer that waits between watching and copying blocks, so that blocks may change owners in between."""

    def __init__(
        self,
        draw: random.Random,
        clock: Callable[[], float],
        store: TierStore,
        pool: BlockCopier,
        cores: frozenset[int] | None = None,
        on_sums: SumListener = IGNORE_SUMS,
    ) -> None:
        super().__init__(store, pool, cores, on_sums, clock=clock)
        self._draw = draw
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._work()  # try to open the store before the worker serves; if the disk fails, a later attempt opens it
        self._task = asyncio.create_task(self._live(), name="kv tier writer")

    def detach(self, timeout_s: float) -> None:
        self.counters.dropped_blocks += len(self._queue)
        self._queue.clear()
        self._blocks = None

    def close(self, timeout_s: float) -> bool:
        self._closing = True
        if self._task is not None:
            self._task.cancel()
        self._store.close()
        return True

    async def _live(self) -> None:
        while not self._closing:
            await asyncio.sleep(PAUSE_S if self._queue else REFRESH_S * self._draw.random())
            names = self._take() if self._work() else []
            if names:
                await self._write_later(names)

    async def _write_later(self, names: Sequence[bytes]) -> None:
        blocks = self._blocks
        if blocks is None:
            return
        try:
            watches = await asyncio.wrap_future(blocks.watch(names))
        except EngineStopped:
            return
        await asyncio.sleep(COPY_S * self._draw.random() ** 3)
        self._trying(lambda: self._store_watched(blocks, names, watches))

    def _work(self) -> bool:
        """Open or refresh the store if that is due; return whether the store can be written."""
        return self.health.allows(self._clock()) and self._trying(self._scan)

    def _trying(self, work: Callable[[], bool]) -> bool:
        """Run `work` and return whether it raised no OSError; record its success or failure in `health`."""
        try:
            if work():
                self.health.worked()
        except OSError as error:
            self._fail(error)
            return False
        return True


class SimulatedExecutor:
    """Replacement of a ThreadPoolExecutor: work takes simulated time, and runs when that time is over."""

    def __init__(self, draw: random.Random, disk: SimulatedDisk, *options: object) -> None:
        """Create an executor. `options`: those of ThreadPoolExecutor, which are ignored."""
        self._draw = draw
        self._disk = disk

    def submit(self, function: Callable[..., Result], *arguments: Any) -> "Future[Result]":
        future: Future[Result] = Future()
        seconds = READ_S * self._draw.random() + self._disk.state.read_delay_s
        asyncio.get_running_loop().call_later(seconds, _carry_out, future, function, arguments)
        return future

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        """Do nothing: pending work ends with its process."""


class InlineExecutor:
    """Executor that runs work immediately, inside the work that submits it."""

    def __init__(self, *options: object) -> None:
        """Create an executor without threads. `options` are ignored."""

    def shutdown(self) -> None:
        """Do nothing: no work is pending."""

    def submit(self, function: Callable[..., Result], *arguments: Any) -> "Future[Result]":
        future: Future[Result] = Future()
        _carry_out(future, function, arguments)
        return future


def _carry_out(future: "Future[Result]", function: Callable[..., Result], arguments: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(*arguments))
    except Exception as error:  # noqa: BLE001 -- delivered to the waiting caller
        future.set_exception(error)


def make_tier(
    disk: SimulatedDisk,
    shape: TierShape,
    owner: str,
    memory: PoolMemory,
    block_tokens: int,
    groups: BlockGroups,
    on_sums: SumListener,
) -> KvTier:
    """Create a KV tier without starting it."""
    pool_shape = memory.description.shape
    form = SegmentFormat(IDENTITY, pool_shape.block_bytes)
    size_bytes = max(least_bytes(form), shape.blocks * form.record_bytes)
    store = TierStore(disk, owner, form, size_bytes)
    options = RestoreOptions(block_tokens, pool_shape.block_bytes, shape.always, groups)
    return KvTier(store, BlockCopier(memory.storage, pool_shape), options, on_sums=on_sums)
