"""The engine of a decode worker: prompts land or are computed here, one batch of tokens comes out per step."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from baton.engine.kv_cache.block_pool import PageCounts, Watch
from baton.engine.plan import Plan
from baton.engine.request import FirstToken, Request, Reservation
from baton.engine.runner.engine import EitherRunner, engine_over
from baton.engine.runner.loop import CacheHandler, EngineLoop
from baton.engine.runner.sharing import SlowDown
from baton.engine.runner.thread import StepTiming
from baton.engine.scheduler.budget import PromptRates
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import SchedulerOutcome

OutcomeHandler = Callable[[Sequence[SchedulerOutcome], StepTiming], None]


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """A picture of the engine between two steps."""

    pages: PageCounts
    held_by_sequences: int  # blocks
    held_by_transfers: int  # blocks
    running_sequences: int
    waiting_sequences: int  # prompts to be computed here, and sequences that were preempted
    pending_tokens: int  # to be computed before the next one is drawn
    unfilled_slots: int  # of blocks of running sequences
    cache_query_tokens: int  # this and the following since the start
    cache_hit_tokens: int
    preemptions: int
    rates: PromptRates


class DecodeLoop(EngineLoop[SchedulerOutcome, DecodeLoad]):
    def __init__(
        self,
        runner: EitherRunner,
        scheduler: Scheduler,
        on_outcomes: OutcomeHandler,
        on_fault: Callable[[BaseException], None],
        prepare: Callable[[], None],
        on_cache: CacheHandler | None = None,
        on_busy: Callable[[bool], None] = lambda busy: None,
    ) -> None:
        self._scheduler = scheduler
        self._steps = SlowDown()
        engine = engine_over(runner, scheduler, self._computed)
        super().__init__(engine, on_outcomes, on_fault, self._observe, prepare, scheduler.pool, on_cache, on_busy)

    def add(self, request: Request, cache_root: bytes | None) -> Future[None]:
        """Queues a prompt to be computed here, within the step budget. The future raises RequestRefused."""
        return self._thread.call(self._scheduler.add, request, cache_root)

    def reserve(self, request: Request, cache_root: bytes | None) -> "Future[Reservation | None]":
        """Takes pages for a prompt that is to land; None: no room now. The future raises RequestRefused."""
        return self._thread.call(self._scheduler.reserve, request, cache_root)

    def activate(self, request_id: int, first_tokens: Sequence[FirstToken]) -> Future[list[SchedulerOutcome]]:
        """The KV of the whole prompt has landed: its sequences join the batch at the next step."""
        return self._thread.call(self._scheduler.activate, request_id, first_tokens)

    def abort(self, request_id: int, landed_blocks: int = 0) -> None:
        """Frees a request in any phase, before any later call is carried out; an unknown one is free already.

        No copy into its pages may be under way. `landed_blocks`: see `Scheduler.abort`.
        """
        self._thread.post(self._scheduler.abort, request_id, landed_blocks)

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Cached blocks that a request will be given when its turn comes: others are evicted before them."""
        self._thread.post(self._scheduler.pool.touch, hashes)

    def watch(self, hashes: Sequence[bytes]) -> Future[Watch]:
        """Cached blocks for a reader in another process, which may learn at the end that they were overwritten."""
        return self._thread.call(self._scheduler.pool.watch, hashes)

    def unwatch(self, watch: Watch) -> None:
        self._thread.post(self._scheduler.pool.unwatch, watch)

    def distrust(self, blocks: Sequence[int]) -> None:
        """See `BlockPool.distrust`."""
        self._thread.post(self._scheduler.pool.distrust, blocks)

    @property
    def slow_down(self) -> float:
        """How many times as long steps take as at their best; 0: not known yet. On any thread."""
        return self._steps.ratio

    def _computed(self, plan: Plan, seconds: float) -> None:
        self._scheduler.observe(plan, seconds)
        if not plan.prompt_tokens:
            self._steps.observe(plan.tokens, seconds)

    def _observe(self) -> DecodeLoad:
        batch = self._scheduler.batch
        counters, pages, held_by_transfers = batch.counters, batch.pool.counts, batch.held_by_transfers
        return DecodeLoad(
            pages=pages,
            held_by_sequences=pages.held - held_by_transfers,
            held_by_transfers=held_by_transfers,
            running_sequences=batch.running_slots,
            waiting_sequences=len(batch.waiting),
            pending_tokens=batch.pending_tokens,
            unfilled_slots=batch.unfilled_slots,
            cache_query_tokens=counters.cache_query_tokens,
            cache_hit_tokens=counters.cache_hit_tokens,
            preemptions=counters.preemptions,
            rates=self._scheduler.prompt_rates,
        )


class Admission:
    """The queue in front of the decode engine's pages. A caller that is cancelled must abort the request on the engine:
    it may just have been taken in.
    """

    def __init__(self, loop: DecodeLoop) -> None:
        self._loop = loop
        self._turn = asyncio.Lock()  # fair: waiters get it in the order of their arrival
        self._room = asyncio.Event()
        self.waiting = 0

    def room_may_have_grown(self) -> None:
        self._room.set()

    async def reserve(self, request: Request, cache_root: bytes | None) -> Reservation:
        """Waits until all earlier requests have their pages and this one's are free.

        Raises: RequestRefused, RequestTooLong.
        """
        self.waiting += 1
        if self._turn.locked():
            self._loop.touch(request.block_hashes)  # those before it take blocks that no request waits for
        try:
            async with self._turn:
                while True:
                    self._room.clear()  # before asking, so that room made meanwhile is not missed
                    reservation = await asyncio.wrap_future(self._loop.reserve(request, cache_root))
                    if reservation is not None:
                        return reservation
                    await self._room.wait()
        finally:
            self.waiting -= 1

    async def add(self, request: Request, cache_root: bytes | None) -> None:
        """Waits its turn and queues a prompt to be computed here; from then on the engine keeps its place in the queue.

        Raises: RequestRefused, RequestTooLong.
        """
        self.waiting += 1
        try:
            async with self._turn:
                await asyncio.wrap_future(self._loop.add(request, cache_root))
        finally:
            self.waiting -= 1
