"""Loads of a prompt's blocks from the KV tier before the prompt is queued, if that is faster than computing them.

Blocks are reserved, filled, published under their names and released, like blocks fetched from another worker
(`prefill_worker/fetch.py`). Loads run one at a time, so that two prompts with one prefix load it once.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from baton.engine.runner.loop import EngineLoop
from baton.engine.runner.thread import EngineStopped
from baton.engine.scheduler.batch import IncomingPrefix
from baton.kvtransfer.tier.health import DiskRetryState
from baton.kvtransfer.tier.loader import TierLoader, TierReader, run_on
from baton.text.block_groups import ONE_GROUP, BlockGroups
from baton.text.kv_loading import LoadCosts
from baton.worker.late_results import result_or_release
from baton.worker.tier.policy import LoadRate, longest_wait_s

logger = logging.getLogger(__name__)
Landed = Callable[[IncomingPrefix, int], None]
"""Function called after a load with the prefix and the number of its leading blocks that have KV."""
PRICED_BLOCKS = 64  # size of the load that is compared with computing, in blocks; each load has a fixed cost
OVERDUE_S = 1.0  # longest wait for a running read after the time limit of its load
TIMEOUT_S = 30.0  # timeout of one load
QUEUE_S = 120.0  # longest wait of a prompt for earlier loads; then it is computed
ROOM_S = 20.0  # longest wait for free blocks
POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class RestoreOptions:
    block_tokens: int
    block_bytes: int
    always: bool = False  # load even if computing seems faster
    groups: BlockGroups = ONE_GROUP

    @property
    def column_bytes(self) -> int:
        return self.block_bytes * self.groups.count


@dataclass(frozen=True, slots=True)
class EngineView:
    """Interface of the engine whose blocks a restorer fills."""

    loop: EngineLoop
    in_pool: Callable[[bytes], bool]
    compute_tokens_per_s: Callable[[], float | None]


@dataclass(frozen=True, slots=True)
class Restored:
    """Result of a load for one prompt; `tokens` may be 0."""

    duration_ms: float
    tokens: int = 0  # tokens added to the prefix cache
    bytes: int = 0


NOTHING_RESTORED = Restored(0.0)


class LoadResult(NamedTuple):
    blocks: int  # number of loaded blocks
    columns: int  # number of the prompt's block-table columns that these blocks complete


NOTHING_LOADED = LoadResult(0, 0)


@dataclass(slots=True)
class RestoreCounters:
    """Counts of prompts' block-table columns since the start; a column is one block if all layers are one group."""

    queried_blocks: int = 0  # columns that the pool lacked, looked up in the tier
    hit_blocks: int = 0  # queried columns that the tier loaded


class TierRestorer:
    """Loader of prompts' blocks from the KV tier. Lives on the event loop; owns the reading thread."""

    def __init__(
        self,
        store: TierReader,
        loader: TierLoader,
        options: RestoreOptions,
        cores: frozenset[int] | None = None,
    ) -> None:
        """Create a restorer. `cores`: CPU cores of the reading thread; None: any."""
        self._store = store
        self._loader = loader
        self._options = options
        self._thread = ThreadPoolExecutor(1, "kv-tier-read", lambda: run_on(cores))
        self._rate = LoadRate()
        self._turn = asyncio.Lock()
        self._engine: EngineView | None = None
        self._loads: set[asyncio.Future[Any]] = set()
        self._trying: asyncio.Task[None] | None = None
        self.health = DiskRetryState()
        self.counters = RestoreCounters()

    @property
    def load_bytes_per_s(self) -> float | None:
        """Return the last measured rate of loads, however old; None if never measured."""
        return self._rate.last_bytes_per_s

    def attach(self, engine: EngineView) -> None:
        self._engine = engine
        self._try_again()

    async def detach(self) -> None:
        """Stop filling blocks. Wait for the running read, unless it hangs."""
        self._engine = None
        if self._trying is not None:
            self._trying.cancel()
            await asyncio.wait((self._trying,))
            self._trying = None
        if self._loads:
            await asyncio.wait(self._loads, timeout=OVERDUE_S)

    @property
    def busy(self) -> bool:
        """Return whether a load is running or waits for free blocks."""
        return self._turn.locked()

    def close(self) -> None:
        self._thread.shutdown(wait=not self._loads, cancel_futures=True)

    def has_more(self, hashes: Sequence[bytes]) -> bool:
        """Return whether the tier has blocks of a prompt that the pool lacks. Call it once per prompt, since it counts
        the lookup.
        """
        engine = self._engine
        if engine is None:
            return False
        cached = self._cached(engine, hashes)
        self.counters.queried_blocks += len(hashes) - cached
        return self._reachable(engine, hashes, cached) > cached and self.health.allows(time.monotonic())

    async def restore(self, hashes: Sequence[bytes]) -> Restored:
        """Load the blocks of `hashes` that the pool lacks and that the prompt could reuse.

        A load begins only after the queued prompts have begun, since these would evict the loaded blocks. Every wait
        has a timeout, except the wait for this worker's engine: the prompt needs the engine anyway. Raises no errors
        of its own; may be cancelled.
        """
        began, landed = time.monotonic(), NOTHING_LOADED
        try:
            async with asyncio.timeout(QUEUE_S) as queue, self._turn:
                await self._wait_for_room(len(hashes))
                began = time.monotonic()
                queue.reschedule(asyncio.get_running_loop().time() + TIMEOUT_S)
                landed = await self._restore(hashes)
        except TimeoutError:
            logger.info("KV load from the tier timed out; computing the prompt instead")
        except EngineStopped as error:
            logger.info("KV load from the tier stopped: %s", error)
        self.counters.hit_blocks += landed.columns
        options, duration_ms = self._options, (time.monotonic() - began) * 1e3
        return Restored(duration_ms, landed.columns * options.block_tokens, landed.blocks * options.block_bytes)

    async def _wait_for_room(self, blocks: int) -> None:
        """Wait until no prompt is queued in the engine and `blocks` blocks are free, for ROOM_S at most."""
        until = time.monotonic() + ROOM_S
        while (engine := self._engine) is not None and time.monotonic() < until:
            load = engine.loop.load
            if not load.waiting_sequences and load.pages.free + load.pages.cached >= blocks:
                return
            await asyncio.sleep(
                POLL_S
            )  # `engine.loop.load` changes after a step, or up to 0.1 s later in a large batch

    @property
    def price(self) -> float:
        """Return the cost of loading a block relative to computing it; 1 if either cost is unknown."""
        engine = self._engine
        if engine is None:
            return 1.0
        costs = self._costs(engine)
        load_s, compute_s = costs.load_s(PRICED_BLOCKS), costs.compute_s(PRICED_BLOCKS)
        return 1.0 if load_s is None or not compute_s else load_s / compute_s

    async def prefetch(self, session_id: bytes, hashes: Sequence[bytes]) -> None:
        """Load a session's blocks that the pool lacks, before its expected next turn; replace only unprotected blocks.

        Does nothing if a prompt is queued in the engine, or if another load runs or is pending. Raises: EngineStopped.
        """
        engine = self._engine
        if engine is None or self.busy or self._loads or not self.health.allows(time.monotonic()):
            return
        if engine.loop.load.waiting_sequences:  # queued prompts need the free blocks
            return
        async with self._turn:
            cached = self._cached(engine, hashes)
            known = hashes[: self._reachable(engine, hashes, cached)]
            if len(known) == cached:
                return
            loop = engine.loop
            incoming = await result_or_release(loop.begin_take_over(known), partial(_release, loop))
            if incoming is not None:
                landed = partial(loop.end_prefetch, session_id=session_id)
                await self._fill(incoming, self._costs(engine), landed)

    async def _restore(self, hashes: Sequence[bytes]) -> LoadResult:
        """Load those blocks of `hashes` that the pool lacks, if that is faster than computing. Raises:
        EngineStopped.
        """
        if self._loads:  # an earlier read still runs, although its prompt stopped waiting
            await asyncio.wait(self._loads, timeout=OVERDUE_S)
        engine = self._engine
        if engine is None or self._loads or not self.health.allows(time.monotonic()):
            return NOTHING_LOADED
        costs = self._costs(engine)
        known = hashes[: self._reachable(engine, hashes, self._cached(engine, hashes))]
        asked = engine.loop.begin_fetch(known, lambda blocks: self._options.always or costs.favour_loading(blocks))
        incoming = await result_or_release(asked, partial(_release, engine.loop))
        return NOTHING_LOADED if incoming is None else await self._fill(incoming, costs, engine.loop.end_fetch)

    async def _fill(self, incoming: IncomingPrefix, costs: LoadCosts, landed: Landed) -> LoadResult:
        """Load blocks into `incoming`, and call `landed` when the load has finished, even after the timeout."""
        cached = incoming.cached_blocks
        names, blocks = incoming.hashes[cached:], incoming.blocks[cached:]
        began = time.monotonic()
        longest_s = longest_wait_s(costs, len(names))
        cancelled = threading.Event()

        def may_continue() -> bool:
            return not cancelled.is_set() and time.monotonic() - began < longest_s

        job = self._thread.submit(self._loader.load, names, blocks, may_continue)
        load = asyncio.wrap_future(job)
        self._loads.add(load)
        load.add_done_callback(partial(self._on_loaded, landed, incoming, began))
        try:
            await asyncio.wait({load}, timeout=longest_s + OVERDUE_S)
        finally:
            cancelled.set()
        if not load.done():
            self._fail(f"read still running after {longest_s + OVERDUE_S:.1f} s")
            return NOTHING_LOADED
        loaded = load.result() if load.exception() is None else 0
        return LoadResult(loaded, incoming.new_columns(cached + loaded))

    def _on_loaded(self, landed: Landed, incoming: IncomingPrefix, began: float, load: "asyncio.Future[int]") -> None:
        """Publish or release the blocks of a finished load, before the waiting prompt continues."""
        self._loads.discard(load)
        error = None if load.cancelled() else load.exception()
        blocks = 0 if load.cancelled() or error is not None else load.result()
        landed(incoming, incoming.cached_blocks + blocks)
        now = time.monotonic()
        if isinstance(error, OSError):
            self._fail(str(error))
        elif error is not None:
            logger.error("KV load from the tier failed unexpectedly", exc_info=error)
        elif blocks:
            self._rate.observe(blocks * self._options.block_bytes, now - began, now)
            self._works()

    def _costs(self, engine: EngineView) -> LoadCosts:
        options, load_rate = self._options, self._rate.bytes_per_s(time.monotonic())
        return LoadCosts(options.block_tokens, options.column_bytes, engine.compute_tokens_per_s(), load_rate)

    def _cached(self, engine: EngineView, hashes: Sequence[bytes]) -> int:
        """Return the number of a prompt's first block-table columns that are in the pool."""
        return self._options.groups.known_columns(hashes, engine.in_pool)

    def _reachable(self, engine: EngineView, hashes: Sequence[bytes], cached: int) -> int:
        """Return the number of a prompt's first block-table columns that are in the pool or the tier.

        `cached`: number of these columns that are in the pool.
        """
        if self._options.groups == ONE_GROUP:
            return cached + self._store.known(hashes[cached:])
        return self._options.groups.known_columns(
            hashes, lambda name: engine.in_pool(name) or self._store.known((name,)) > 0
        )

    def _fail(self, why: str) -> None:
        if self.health.failed(time.monotonic()):
            logger.warning("KV tier disabled for reads: %s; retrying in the background", why)
            self._try_again()

    def _works(self) -> None:
        if self.health.worked():
            logger.warning("KV tier enabled for reads again")

    def _try_again(self) -> None:
        if not self.health.is_on and self._engine is not None and (self._trying is None or self._trying.done()):
            self._trying = asyncio.create_task(self._retry())

    async def _retry(self) -> None:
        """Retry reads until one works. Prompts do not retry: routers send them elsewhere while reads are disabled."""
        while not self.health.is_on:
            await asyncio.sleep(self.health.pause_left_s(time.monotonic()))
            if self._loads:
                await asyncio.wait(self._loads, timeout=OVERDUE_S)
            elif not self.health.is_on:
                await self._try_reading()

    async def _try_reading(self) -> None:
        reading = asyncio.wrap_future(self._thread.submit(self._store.try_reading))
        self._loads.add(reading)
        reading.add_done_callback(self._on_tried)
        await asyncio.wait((reading,), timeout=OVERDUE_S)
        if not reading.done():
            self._fail(f"read still running after {OVERDUE_S:.1f} s")

    def _on_tried(self, reading: "asyncio.Future[None]") -> None:
        self._loads.discard(reading)
        if reading.cancelled():
            return
        error = reading.exception()
        if error is None:
            self._works()
            return
        if not isinstance(error, OSError):
            logger.error("test read of the KV tier failed unexpectedly", exc_info=error)
        self._fail(str(error))


def _release(loop: EngineLoop, incoming: IncomingPrefix | None) -> None:
    if incoming is not None:
        loop.end_fetch(incoming, 0)
