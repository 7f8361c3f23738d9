"""Compares a share of the cached blocks that a prompt is about to use with the checksums that they had.

Of the blocks that are published, and of those that prompts use, a share is drawn at random and summed, by a thread of
its own; so a block that is used much is compared sooner or later, whichever it is. The first sum of a block is what
the later ones are held against. Where the tier of files sums every block that it writes, that sum is the first.

Watches keep a block from being given away while it is read (`BlockPool.watch_each`), and hold up no eviction. What a
sum was of is certain since the event loop hears of every eviction before it hears of a watch that was set later.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from baton.engine.kv_cache.block_pool import CacheChanges, Watch
from baton.engine.runner.loop import EngineLoop
from baton.engine.runner.thread import EngineStopped
from baton.kvtransfer.checksum import Checksums, SampledPlaces
from baton.kvtransfer.tier.loader import run_on
from baton.worker.at_rest.sums import KnownSums, RestCounters, Verdict

logger = logging.getLogger(__name__)
MOST_BLOCKS = 64  # of a prompt: it waits for them
QUEUED_BLOCKS = 1024  # that wait to be summed for no prompt; further ones are not


class CachedBlocks(NamedTuple):
    """Interface of the engine whose cache is checked."""

    loop: EngineLoop
    in_pool: Callable[[bytes], bool]


class RestChecker:
    """Lives on the event loop; owns the thread that sums."""

    def __init__(
        self,
        checksums: Checksums,
        share: float,
        cores: frozenset[int] | None = None,
        draws: random.Random | None = None,
    ) -> None:
        """Start the thread. `share`: of blocks, in [0, 1]. `cores`: where the thread runs; None: anywhere."""
        self._checksums = checksums
        self._used, self._published = SampledPlaces(share, draws), SampledPlaces(share, draws)
        self._thread = ThreadPoolExecutor(1, "kv-at-rest", lambda: run_on(cores))
        self._known = KnownSums()
        self._cache: CachedBlocks | None = None
        self._events: asyncio.AbstractEventLoop | None = None
        self._queue: list[bytes] = []
        self._working: asyncio.Task[None] | None = None

    @property
    def counters(self) -> RestCounters:
        return self._known.counters

    def attach(self, cache: CachedBlocks) -> None:
        self._cache = cache
        self._events = asyncio.get_running_loop()

    async def detach(self) -> None:
        """The engine is about to end: no block is looked at any more."""
        self._cache = self._events = None
        self._queue.clear()
        if self._working is not None:
            await asyncio.wait([self._working])
        self._known.clear()

    def close(self) -> None:
        self._thread.shutdown()

    def on_changes(self, changes: CacheChanges) -> None:
        """Process all changes of the cache, in their order."""
        self._known.forget(changes.evicted)
        self._known.forget(changes.stored)
        self._compare_soon([changes.stored[place] for place in self._published.draw(len(changes.stored))])

    def _compare_soon(self, names: Sequence[bytes]) -> None:
        """Compare blocks without a waiting prompt, as many as there is room for."""
        self._queue += names[: QUEUED_BLOCKS - len(self._queue)]
        if self._queue and self._working is None and self._cache is not None:
            self._working = asyncio.create_task(self._work_off(), name="kv-at-rest")

    def take_sums(self, sums: Sequence[tuple[bytes, int]]) -> frozenset[bytes]:
        """Checksums of cached blocks that another thread took, under watches that had not broken.

        Returns those that are not what they were: they are compared again, and are not to be kept. On any thread.
        """
        doubted = frozenset(name for name, checksum in sums if self._known.differs(name, checksum))
        events = self._events  # which may end meanwhile
        if events is not None:
            events.call_soon_threadsafe(self._learn, [each for each in sums if each[0] not in doubted], doubted)
        return doubted

    def _learn(self, sums: Sequence[tuple[bytes, int]], doubted: Iterable[bytes]) -> None:
        cache = self._cache
        if cache is not None:
            for name, checksum in sums:
                if cache.in_pool(name):
                    self._known.learn(name, checksum)
            self._compare_soon(sorted(doubted))

    def drawn(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Return which of a prompt's cached blocks must be compared before it uses them. Call it once for a prompt."""
        cache = self._cache
        if cache is None:
            return []
        groups, cached = cache.loop.groups, takewhile(cache.in_pool, hashes)
        of_columns = (groups.name(block_hash, group) for block_hash in cached for group in range(groups.count))
        names = list(filter(cache.in_pool, of_columns))
        return [names[place] for place in self._used.draw(len(names))][:MOST_BLOCKS]

    async def check(self, names: Sequence[bytes]) -> None:
        """Compare blocks. Those that differ are gone from the cache when a later call to the engine is carried out.

        Bounded by a step of the engine and the sums of a few blocks. Raises nothing of its own; may be cancelled.
        """
        cache = self._cache
        if cache is None:
            return
        try:
            asked = cache.loop.watch_each(names)
            watches = await asyncio.wrap_future(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(partial(_unwatch_all, cache.loop))
            raise
        except EngineStopped as error:
            logger.debug("no cached block is compared: %s", error)
            return
        try:
            there = [(name, watch) for name, watch in zip(names, watches, strict=True) if watch.blocks]
            blocks = [watch.blocks[0] for _, watch in there]
            sums = await asyncio.get_running_loop().run_in_executor(self._thread, self._sum, blocks)
            for (name, watch), checksum in zip(there, sums, strict=True):
                if not watch.broken:
                    self._compare(cache.loop, name, watch.blocks[0], checksum)
        finally:
            for watch in watches:
                cache.loop.unwatch(watch)

    def _sum(self, blocks: Sequence[int]) -> list[int]:
        return [self._checksums.of(block) for block in blocks]

    def _compare(self, loop: EngineLoop, name: bytes, block: int, checksum: int) -> None:
        if self._known.compare(name, checksum) is Verdict.CORRUPT:
            logger.error("cached KV has changed: block %d is dropped with all behind it, and computed again", block)
            loop.distrust([block])

    async def _work_off(self) -> None:
        try:
            while self._queue:
                names, self._queue = self._queue[:MOST_BLOCKS], self._queue[MOST_BLOCKS:]
                await self.check(names)
        finally:
            self._working = None


def _unwatch_all(loop: EngineLoop, asked: "Future[list[Watch]]") -> None:
    if not asked.cancelled() and asked.exception() is None:
        for watch in asked.result():
            loop.unwatch(watch)
