"""Writer of published KV blocks to a tier, on a thread of its own.

Block names wait in a bounded queue without pinning blocks. For a few names at a time the engine's thread sets watches
on their blocks (`BlockPool.watch_each`). The writer copies the blocks, and drops a copy if its watch broke during the
copy. So no block is pinned for the tier, and evictions never wait for it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from baton.engine.kv_cache.block_pool import Watch
from baton.engine.runner.thread import EngineStopped
from baton.kvtransfer.tier.files import OwnerBusy
from baton.kvtransfer.tier.health import DiskRetryState
from baton.kvtransfer.tier.loader import run_on, staging_slots
from baton.kvtransfer.tier.staging import BlockCopier, Staging
from baton.kvtransfer.tier.store import NamedBlock, TierStore
from baton.worker.late_results import release_when_done

logger = logging.getLogger(__name__)
QUEUED_BLOCKS = 16_384
REFRESH_S = 0.5  # period of scans for files of other workers
LEAST_REST_S = 0.01  # shortest pause between two rounds of writes
WATCH_TIMEOUT_S = 30.0  # longest wait for the engine to set watches; usually one step


class QueuedName(NamedTuple):
    name: bytes
    at: float  # time of queueing, monotonic seconds


@dataclass(slots=True)
class WriteCounters:
    dropped_blocks: int = 0  # blocks dropped because the queue was full
    gone_blocks: int = 0  # blocks evicted from the pool before they were copied


SumListener = Callable[[Sequence[tuple[bytes, int]]], Set[bytes]]
"""Function of the names and checksums of copied blocks; returns the corrupt ones, which are not written. Called on the
writer's thread.
"""
IGNORE_SUMS: SumListener = lambda sums: frozenset()  # noqa: E731


class Blocks(NamedTuple):
    """Functions of the engine that set and remove watches on blocks."""

    watch: Callable[[Sequence[bytes]], "Future[list[Watch]]"]
    unwatch: Callable[[Watch], None]


class TierWriter:
    """Owner of the thread that opens, fills and refreshes a store. `offer` is called on the event loop."""

    def __init__(
        self,
        store: TierStore,
        pool: BlockCopier,
        cores: frozenset[int] | None = None,
        on_sums: SumListener = IGNORE_SUMS,
        queued_blocks: int = QUEUED_BLOCKS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the thread without starting it. `cores`: CPU cores of the thread; None: any."""
        self._store = store
        self._pool = pool
        self._cores = cores
        self._queued_blocks = queued_blocks
        self._clock = clock
        self._staging = Staging(staging_slots(store.format.block_bytes), store.format.block_bytes, pinned=pool.on_gpu)
        self.health = DiskRetryState()
        self.counters = WriteCounters()
        self.opened = threading.Event()
        """Set once the content of the files is known, or cannot be read for now."""
        self._on_sums = on_sums
        self._queue: deque[QueuedName] = deque()
        self._blocks: Blocks | None = None
        self._settle_s = 0.0
        self._wake = threading.Condition()
        self._refresh_at = 0.0
        self._flushing = self._closing = False
        self._working = False
        self._thread = threading.Thread(target=self._run, name="kv-tier-write", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def attach(self, blocks: Blocks, settle_s: float) -> None:
        """Connect the engine. `settle_s`: delay before a block is written, so that another worker may write it
        first.
        """
        with self._wake:
            self._blocks, self._settle_s = blocks, settle_s

    def offer(self, names: Sequence[bytes]) -> None:
        """Queue published blocks; stored ones are skipped."""
        now = self._clock()
        with self._wake:
            for name in names:
                if self._store.known((name,)):
                    continue
                if len(self._queue) >= self._queued_blocks:
                    self.counters.dropped_blocks += 1
                else:
                    self._queue.append(QueuedName(name, now))
            self._wake.notify_all()

    def detach(self, timeout_s: float) -> None:
        """Write queued blocks, for `timeout_s` at most, after which the engine may stop. Blocks the calling thread."""
        deadline = time.monotonic() + timeout_s
        with self._wake:
            self._flushing = True
            self._wake.notify_all()
            while (self._queue or self._working) and self.health.is_on and time.monotonic() < deadline:
                self._wake.wait(deadline - time.monotonic())
            self._flushing = False
            self.counters.dropped_blocks += len(self._queue)
            self._queue.clear()
            self._blocks = None

    def close(self, timeout_s: float) -> bool:
        """Stop the thread after its current write and close the store; return whether it stopped in time."""
        if self._thread.ident is None:
            return True  # the thread was never started
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def queued(self) -> int:
        return len(self._queue)

    def _run(self) -> None:
        run_on(self._cores)
        while not self._closing:
            if self.health.allows(self._clock()):
                try:
                    worked = self._turn()
                except OSError as error:
                    self._fail(error)
                else:
                    if worked and self.health.worked():
                        logger.warning("KV tier enabled for writes again")
            self._rest()
        self._store.close()

    def _turn(self) -> bool:
        """Scan for files and write queued blocks; return whether the disk was used successfully. Raises: OSError."""
        worked = self._scan()
        while names := self._take():
            try:
                worked |= self._write([name for name in names if not self._store.known((name,))])
            except OSError:
                self.counters.dropped_blocks += len(names)
                raise
            finally:
                with self._wake:
                    self._working = False
                    self._wake.notify_all()
        return worked

    def _scan(self) -> bool:
        """Open the store or scan for files of other workers; return whether this call opened it. Raises: OSError."""
        opens = not self._store.is_open
        if opens:
            began = time.monotonic()
            self._store.open()
            logger.info("KV tier opened in %.2f s: %d blocks", time.monotonic() - began, len(self._store))
            self.opened.set()
        if self._clock() >= self._refresh_at:
            self._store.refresh()
            self._refresh_at = self._clock() + REFRESH_S
        return opens

    def _take(self) -> list[bytes]:
        """Dequeue names that have waited long enough, as many as fit into the staging memory."""
        names: list[bytes] = []
        with self._wake:
            if self._closing:
                return []
            before = self._clock() - (0.0 if self._flushing else self._settle_s)
            while self._queue and self._queue[0].at <= before and len(names) < self._staging.slots:
                names.append(self._queue.popleft().name)
            self._working = bool(names)
        return names

    def _write(self, names: Sequence[bytes]) -> bool:
        """Write the blocks with these names and return whether any was written. Raises: OSError."""
        blocks = self._blocks
        if blocks is None or not names:
            return False
        return self._store_watched(blocks, names, self._watch(blocks, names))

    def _store_watched(self, blocks: Blocks, names: Sequence[bytes], watches: Sequence[Watch]) -> bool:
        """Write watched blocks, end the watches, and return whether any was written. Raises: OSError."""
        there = [(name, watch) for name, watch in zip(names, watches, strict=True) if watch.blocks]
        try:
            self._pool.copy_out([watch.blocks[0] for _, watch in there], self._staging)
            copied = [
                NamedBlock(name, self._staging.checksum(slot), self._staging.block(slot))
                for slot, (name, watch) in enumerate(there)
                if not watch.broken  # an unbroken watch after the copy proves its content
            ]
            lasting = {name for name, watch in there if not watch.broken}
            damaged = self._on_sums([(block.name, block.checksum) for block in copied if block.name in lasting])
            copied = [block for block in copied if block.name not in damaged]
        finally:
            for _, watch in there:
                blocks.unwatch(watch)
        self.counters.gone_blocks += len(names) - len(copied)
        self._store.put(copied)
        return bool(copied)

    @staticmethod
    def _watch(blocks: Blocks, names: Sequence[bytes]) -> list[Watch]:
        """Return one watch per name; watches without blocks if the engine does not respond."""

        def release(watches: Sequence[Watch]) -> None:
            for watch in watches:
                blocks.unwatch(watch)

        asked: Future[list[Watch]] | None = None
        try:
            asked = blocks.watch(names)
            return asked.result(WATCH_TIMEOUT_S)
        except (EngineStopped, TimeoutError) as error:
            why = str(error) or f"no answer of the engine within {WATCH_TIMEOUT_S:g} s"
            logger.info("%d blocks not written to the KV tier: %s", len(names), why)
        if asked is not None and not asked.cancel():
            release_when_done(asked, release)
        return [Watch(()) for _ in names]

    def _fail(self, error: OSError) -> None:
        if self.health.failed(self._clock()):
            uses = "reads and writes" if isinstance(error, OwnerBusy) else "writes"
            logger.warning("KV tier disabled for %s: %s; retrying in the background", uses, error)
        self.opened.set()

    def _rest(self) -> None:
        """Wait until there are blocks to write or a scan is due."""
        with self._wake:
            if not (self._closing or (self._flushing and self._queue and self.health.is_on)):
                soon = self._queue and self.health.is_on
                self._wake.wait(min(REFRESH_S, max(LEAST_REST_S, self._settle_s)) if soon else REFRESH_S)
