"""Checks of cached KV before prompts use it: a random share of the blocks is compared with earlier checksums.

Some of the published and of the reused blocks are drawn at random, and a thread computes their checksums, so that a
block that is used often is compared sooner or later. The first checksum of a block is the reference. It may also come
from a KV tier, which computes the checksum of every block that it writes.

Watches (`BlockPool.watch_each`) tell whether a block was reassigned while its checksum was computed; they delay no
eviction. The event loop processes each eviction before any watch that is set after it. So it never compares new
content with the checksum of evicted content.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import NamedTuple

from baton.engine.kv_cache.block_pool import CacheChanges, Watch
from baton.engine.runner.loop import EngineLoop
from baton.engine.runner.thread import EngineStopped
from baton.kvtransfer.checksum import Checksums, SampledPlaces
from baton.kvtransfer.tier.loader import run_on
from baton.worker.at_rest.sums import KnownSums, RestCounters
from baton.worker.late_results import result_or_release

logger = logging.getLogger(__name__)
MOST_BLOCKS = 64  # maximum number of blocks checked per prompt; the prompt waits for them
QUEUED_BLOCKS = 1024  # maximum number of queued blocks that no prompt waits for


class CachedBlocks(NamedTuple):
    """Interface of the engine whose cached blocks a RestChecker checks."""

    loop: EngineLoop
    in_pool: Callable[[bytes], bool]


class RestChecker:
    """Checker of one worker's cached blocks. Lives on the event loop; owns the thread that computes the checksums."""

    def __init__(
        self,
        checksums: Checksums,
        share: float,
        cores: frozenset[int] | None = None,
        draws: random.Random | None = None,
    ) -> None:
        """Create a checker. `share`: share of the published and of the reused blocks to check, in [0, 1]. `cores`: CPU
        cores of the checksum thread; None: any core.
        """
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
        """Stop reading blocks, because the engine is about to stop."""
        self._cache = self._events = None
        self._queue.clear()
        if self._working is not None:
            await asyncio.wait([self._working])
        self._known.clear()

    def close(self) -> None:
        self._thread.shutdown()

    def on_changes(self, changes: CacheChanges) -> None:
        """Process a change of the prefix cache. Call it for every change, in order."""
        self._known.forget(changes.evicted)
        self._known.forget(changes.stored)
        self._compare_soon([changes.stored[place] for place in self._published.draw(len(changes.stored))])

    def _compare_soon(self, names: Sequence[bytes]) -> None:
        """Queue blocks for a comparison in the background; drop blocks beyond QUEUED_BLOCKS."""
        self._queue += names[: QUEUED_BLOCKS - len(self._queue)]
        if self._queue and self._working is None and self._cache is not None:
            self._working = asyncio.create_task(self._compare_queued(), name="kv-at-rest")

    def take_sums(self, sums: Sequence[tuple[bytes, int]]) -> frozenset[bytes]:
        """Compare the caller's checksums of cached blocks with the known ones; return the blocks that differ.

        The caller must have watched the blocks and found their watches unbroken. It must not store the returned
        blocks, which are compared again in the background. Any thread may call this.
        """
        doubted = frozenset(name for name, checksum in sums if self._known.differs(name, checksum))
        events = self._events  # read once: `detach` may clear the field at any time
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
        """Return a random sample of a prompt's cached blocks, which must be checked before the prompt uses them.

        Call it once per prompt.
        """
        cache = self._cache
        if cache is None:
            return []
        groups = cache.loop.groups
        cached = takewhile(cache.in_pool, hashes) if groups.whole else hashes  # windows pass over the first columns
        of_columns = (groups.name(block_hash, group) for block_hash in cached for group in range(groups.count))
        names = list(filter(cache.in_pool, of_columns))
        return [names[place] for place in self._used.draw(len(names))][:MOST_BLOCKS]

    async def check(self, names: Sequence[bytes]) -> None:
        """Compare blocks with their known checksums; remove corrupt ones from the cache before the engine executes any
        later call.

        Takes as long as one step of the engine and the checksums of a few blocks. Raises no errors of its own; may be
        cancelled.
        """
        cache = self._cache
        if cache is None:
            return
        loop = cache.loop

        def release(watches: Iterable[Watch]) -> None:
            for watch in watches:
                loop.unwatch(watch)

        try:
            watches = await result_or_release(loop.watch_each(names), release)
        except EngineStopped as error:
            logger.debug("cached blocks not compared: %s", error)
            return
        try:
            there = [(name, watch) for name, watch in zip(names, watches, strict=True) if watch.blocks]
            blocks = [watch.blocks[0] for _, watch in there]
            sums = await asyncio.get_running_loop().run_in_executor(self._thread, self._sum, blocks)
            for (name, watch), checksum in zip(there, sums, strict=True):
                if not watch.broken and not self._known.matches(name, checksum):
                    block = watch.blocks[0]
                    logger.error("cached KV is corrupt: block %d; it and the blocks after it are recomputed", block)
                    loop.distrust([block])
        finally:
            release(watches)

    def _sum(self, blocks: Sequence[int]) -> list[int]:
        return [self._checksums.of(block) for block in blocks]

    async def _compare_queued(self) -> None:
        try:
            while self._queue:
                names, self._queue = self._queue[:MOST_BLOCKS], self._queue[MOST_BLOCKS:]
                await self.check(names)
        finally:
            self._working = None
