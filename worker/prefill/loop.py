"""Plans carried out at the pace that a shared GPU allows: rests between chunks, and their size."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from baton.engine.kv_cache.block_pool import PageCounts, Watch
from baton.engine.plan import ChunkResult, Plan
from baton.engine.runner.engine import Engine, PlanRunner
from baton.engine.runner.loop import CacheHandler, EngineLoop
from baton.engine.runner.sharing import DeviceShare
from baton.engine.runner.thread import StepTiming
from baton.engine.scheduler.prefill import IncomingPrefix, PrefillProgress, PrefillRequest, PrefillScheduler

MOST_REST_S = 0.05  # at a time: meanwhile nothing is called off, and no prompt begins


class Chunked(Protocol):
    chunk_tokens: int


class PrefillThrottle:
    """A PlanRunner around another; rests come before a step, so that the last step's results have been handed on."""

    def __init__(
        self,
        runner: PlanRunner,
        scheduler: Chunked,
        share: DeviceShare,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._runner, self._scheduler, self._share = runner, scheduler, share
        self._now, self._sleep = now, sleep
        self._rested_at = 0.0  # when the next step may begin

    def run(self, plan: Plan) -> tuple[ChunkResult, ...]:
        if (rest_s := self._rested_at - self._now()) > 0:
            self._sleep(min(rest_s, MOST_REST_S))
        started = self._now()
        results = self._runner.run(plan)
        ended = self._now()
        self._rested_at = ended + self._share.rest_s(ended - started, ended)
        self._scheduler.chunk_tokens = self._share.chunk_tokens(ended)
        return results

    def observe_slow_down(self, slow_down: float) -> None:
        """A decode worker on this GPU reports how many times as long its steps take as at their best."""
        self._share.observe_slow_down(slow_down, self._now())


ProgressHandler = Callable[[Sequence[PrefillProgress], StepTiming], None]


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """A picture of the engine between two steps."""

    pages: PageCounts
    held_by_sequences: int  # blocks
    held_by_transfers: int  # blocks
    waiting_requests: int
    running_sequences: int
    pending_tokens: int
    cache_query_tokens: int  # since the start
    cache_hit_tokens: int


class PrefillLoop(EngineLoop[PrefillProgress, PrefillLoad]):
    def __init__(
        self,
        runner: PlanRunner,
        scheduler: PrefillScheduler,
        on_progress: ProgressHandler,
        on_fault: Callable[[BaseException], None],
        prepare: Callable[[], None],
        share: DeviceShare,
        on_cache: CacheHandler | None = None,
        on_busy: Callable[[bool], None] = lambda busy: None,
    ) -> None:
        self._scheduler = scheduler
        self._throttle = PrefillThrottle(runner, scheduler, share)
        engine, pool = Engine(self._throttle, scheduler), scheduler.pool
        super().__init__(engine, on_progress, on_fault, self._observe, prepare, pool, on_cache, on_busy)

    def observe_slow_down(self, slow_down: float) -> None:
        """A decode worker on the same GPU reports how many times as long its steps take as at their best."""
        self._thread.post(self._throttle.observe_slow_down, slow_down)

    def add(self, request: PrefillRequest) -> Future[None]:
        """Queues a prompt. The future raises RequestRefused, RequestTooLong."""
        return self._thread.call(self._scheduler.add, request)

    def abort(self, request_id: int) -> None:
        """Forgets a prompt in any phase and frees its pages; an unknown one is forgotten already."""
        self._thread.post(self._scheduler.abort, request_id)

    def land(self, hashes: Sequence[bytes], worthwhile: Callable[[int], bool]) -> "Future[IncomingPrefix | None]":
        """Takes pages for blocks that are to be fetched: see `PrefillScheduler.land`, also for its result."""
        return self._thread.call(self._scheduler.land, hashes, worthwhile)

    def landed(self, incoming: IncomingPrefix, blocks: int) -> None:
        """The first `blocks` of them have their KV, the copying has ended. Comes before calls that are queued later."""
        self._thread.post(self._scheduler.landed, incoming, blocks)

    def watch(self, hashes: Sequence[bytes]) -> Future[Watch]:
        """Cached blocks for a reader in another process, which may learn at the end that they were overwritten."""
        return self._thread.call(self._scheduler.pool.watch, hashes)

    def unwatch(self, watch: Watch) -> None:
        self._thread.post(self._scheduler.pool.unwatch, watch)

    def distrust(self, blocks: Sequence[int]) -> None:
        """See `BlockPool.distrust`."""
        self._thread.post(self._scheduler.pool.distrust, blocks)

    def _observe(self) -> PrefillLoad:
        scheduler, pages = self._scheduler, self._scheduler.pool.counts
        held_by_transfers = scheduler.held_by_transfers  # looks at every pinned block: once a step is enough
        return PrefillLoad(
            pages,
            pages.held - held_by_transfers,
            held_by_transfers,
            scheduler.waiting_requests,
            scheduler.running_sequences,
            scheduler.pending_tokens,
            scheduler.cache_query_tokens,
            scheduler.cache_hit_tokens,
        )
