"""Engine on its own thread, used from an event loop: calls are passed to the thread, and outcomes to callbacks."""

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from baton.engine.kv_cache.block_pool import BlockCounts, BlockPool, CacheChanges, Watch
from baton.engine.kv_cache.eviction import EvictionOrder, SessionCounts
from baton.engine.kv_cache.sessions import DueSession, KeptBlocks, SessionTurn
from baton.engine.request import FirstToken, Request, Reservation
from baton.engine.runner.core_use import CoreUse
from baton.engine.runner.engine import Engine
from baton.engine.runner.step_records import (
    NO_TIME,
    CallKind,
    HandOver,
    LoopDelay,
    RecordedCall,
    StepHistory,
    StepRecord,
    StepRecorder,
    StepTimeBreakdown,
    StepTiming,
    WaitedBefore,
)
from baton.engine.runner.thread import EngineThread
from baton.engine.runner.thread_meter import ThreadMeter
from baton.engine.scheduler.batch import IncomingPrefix
from baton.engine.scheduler.budget import PromptRates
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import SchedulerOutcome
from baton.engine.scheduler.speculation import Speculated
from baton.text.block_groups import BlockGroups
from baton.text.cpu_wait import ProcessQueue

Result = TypeVar("Result")
OutcomeHandler = Callable[[Sequence[SchedulerOutcome], StepRecord], None]
CacheHandler = Callable[[CacheChanges], None]
logger = logging.getLogger(__name__)
ALWAYS_OBSERVED = 32  # running sequences up to which each step has its own snapshot of the engine
OBSERVED_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Snapshot of the engine between two steps."""

    pages: BlockCounts
    held_by_sequences: int  # number of blocks that running sequences use
    held_by_transfers: int  # number of blocks that only transfers use
    running_sequences: int
    waiting_sequences: int  # number of prompts to compute and of preempted sequences
    pending_tokens: int  # tokens to compute before the next token is sampled
    unfilled_slots: int  # token slots without KV in blocks of running sequences
    cache_query_tokens: int  # tokens looked up in the prefix cache since the start
    cache_hit_tokens: int  # tokens found in the prefix cache since the start
    preemptions: int  # number since the start
    rates: PromptRates
    speculated: Speculated
    sessions: SessionCounts

    @classmethod
    def of(cls, scheduler: Scheduler) -> "EngineLoad":
        batch = scheduler.batch
        counters, pages = batch.counters, batch.pool.counts
        held_by_transfers = batch.held_by_transfers  # read once per step, since it visits every pinned block
        return cls(
            pages=pages,
            held_by_sequences=pages.held - held_by_transfers,
            held_by_transfers=held_by_transfers,
            running_sequences=batch.running_sequences,
            waiting_sequences=len(batch.waiting),
            pending_tokens=batch.pending_tokens,
            unfilled_slots=batch.unfilled_slots,
            cache_query_tokens=counters.cache_query_tokens,
            cache_hit_tokens=counters.cache_hit_tokens,
            preemptions=counters.preemptions,
            rates=scheduler.prompt_rates,
            speculated=Speculated() if scheduler.speculation is None else scheduler.speculation.done,
            sessions=batch.pool.order.counts,
        )


class LoadObserver:
    """Creates snapshots of a scheduler between steps. A snapshot visits every sequence, so that one of a large batch is
    kept for `OBSERVED_EVERY_S`.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._observed = EngineLoad.of(scheduler)
        self._due_s = 0.0

    def observe(self) -> EngineLoad:
        """Return a snapshot. Call it on the engine's thread."""
        now = time.monotonic()
        if len(self._scheduler.batch.running) <= ALWAYS_OBSERVED or now >= self._due_s:
            self._observed, self._due_s = EngineLoad.of(self._scheduler), now + OBSERVED_EVERY_S
        return self._observed


class EngineLoop:
    """Engine thread, and the callbacks that it triggers on the event loop that creates this object.

    `on_outcomes`, `on_fault` and `on_cache` are called on that loop. A step's changes of the prefix cache are reported
    before its outcomes.
    """

    def __init__(
        self,
        engine: Engine,
        on_outcomes: OutcomeHandler,
        on_fault: Callable[[BaseException], None],
        prepare: Callable[[], None] = lambda: None,
        on_cache: CacheHandler | None = None,
        cores: CoreUse | None = None,
    ) -> None:
        """Create the thread without starting it. `prepare`, `cores`: see `EngineThread`."""
        events = asyncio.get_running_loop()
        self._engine = engine
        self._scheduler = scheduler = engine.scheduler
        self._recorder: StepRecorder | None = None
        self._calls: list[RecordedCall] = []  # calls since the last step; used on the engine's thread only
        loop_thread = threading.get_native_id()
        self.history = StepHistory()
        """Steps whose outcomes were delivered."""
        self._queue = ProcessQueue()
        self._hand_over = HandOver(ThreadMeter(), self._queue.share)
        self.held: StepTimeBreakdown = NO_TIME
        """Breakdown of the time from the end of the last delivered step to its delivery."""

        def make_ready() -> None:
            prepare()
            self._recorder = StepRecorder(scheduler.batch, ThreadMeter(beside=loop_thread), scheduler.speculation)

        def on_step(outcomes: Sequence[SchedulerOutcome], timing: StepTiming) -> None:
            recorder, done = self._recorder, engine.done
            assert recorder is not None and done is not None
            waited = WaitedBefore(self._thread.idle_s, self._thread.lent_s)
            record = recorder.record(timing, done, waited, self._calls)
            self._calls.clear()
            _post(events, hand_over, outcomes, record)

        def hand_over(outcomes: Sequence[SchedulerOutcome], record: StepRecord) -> None:
            self.history.add(record)
            now = time.monotonic()
            self.held = self._hand_over.take(max(0.0, now - record.ended), now)
            try:
                on_outcomes(outcomes, record)
            except Exception as fault:  # no caller would see the exception, so it stops the worker
                logger.exception("step outcomes could not be applied; stopping the worker")
                on_fault(fault)

        self._thread: EngineThread[SchedulerOutcome, EngineLoad] = EngineThread(
            engine,
            on_step=on_step,
            on_fault=lambda fault: _post(events, on_fault, fault),
            observe=LoadObserver(scheduler).observe,
            prepare=make_ready,
            cores=cores,
            spare_s=engine.spare_s,
        )
        if on_cache is not None:
            _publish_cache_changes(scheduler.pool, events, on_cache)

    @property
    def since_hand_over(self) -> LoopDelay:
        """Busy time of this process between the last two deliveries of outcomes.

        It may have delayed sending the first of these two deliveries.
        """
        return self._hand_over.since

    async def start(self) -> None:
        """Start the thread and wait until the engine is warm. Raises: EngineStopped if warming up failed."""
        self._thread.start()
        await asyncio.wrap_future(self._thread.call(lambda: None))

    def stop(self, timeout_s: float) -> bool:
        """Stop the thread after its current step. Returns whether it stopped in time."""
        ended = self._thread.stop(timeout_s)
        if ended and self._recorder is not None:
            self._recorder.close()
            self._recorder = None
            self._hand_over.close()
            self._queue.close()
        return ended

    def add(self, request: Request, cache_root: bytes | None = None) -> Future[None]:
        """Queue a prompt to compute here. The future raises RequestRefused, RequestTooLong."""
        return self._thread.call(
            self._recorded, CallKind.ADD, request.request_id, self._scheduler.add, request, cache_root
        )

    def reserve(self, request: Request, cache_root: bytes | None) -> "Future[Reservation | None]":
        """Reserve blocks for a prompt whose KV will be received; None if too few are free. Raises: RequestRefused."""
        reserve = self._scheduler.reserve
        return self._thread.call(self._recorded, CallKind.RESERVE, request.request_id, reserve, request, cache_root)

    def activate(
        self, request_id: int, first_tokens: Sequence[FirstToken], received_s: float
    ) -> Future[list[SchedulerOutcome]]:
        """Start the choices of a request, whose KV was received at `received_s`, with the next step."""
        activate = functools.partial(self._scheduler.activate, request_id, first_tokens, received_s)
        return self._thread.call(self._recorded, CallKind.ACTIVATE, request_id, activate)

    def abort(self, request_id: int, landed_blocks: int = 0) -> None:
        """Remove a request in any phase, before later calls are executed. Unknown requests are ignored.

        No copy into its blocks may be in flight. `landed_blocks`: see `Scheduler.abort`.
        """
        abort = self._scheduler.abort
        self._thread.post(self._recorded, CallKind.ABORT, request_id, abort, request_id, landed_blocks)

    def _recorded(self, kind: CallKind, request_id: int, call: Callable[..., Result], *arguments: Any) -> Result:
        """Call the scheduler, and record the call for the next step's record."""
        result = call(*arguments)
        if kind is not CallKind.RESERVE or result is not None:
            self._calls.append(RecordedCall(kind, request_id))
        return result

    def begin_fetch(
        self, hashes: Sequence[bytes], worthwhile: Callable[[int], bool]
    ) -> "Future[IncomingPrefix | None]":
        """Allocate blocks for a prefix to fetch: see `RunningBatch.begin_fetch`."""
        return self._thread.call(self._scheduler.batch.begin_fetch, hashes, worthwhile)

    def end_fetch(self, incoming: IncomingPrefix, blocks: int) -> None:
        """Close a fetch before later calls are executed. `blocks`: number of leading blocks with valid KV."""
        self._thread.post(self._scheduler.batch.end_fetch, incoming, blocks)

    def begin_take_over(self, hashes: Sequence[bytes]) -> "Future[IncomingPrefix | None]":
        """Allocate blocks for a session from another worker: see `RunningBatch.begin_take_over`."""
        return self._thread.call(self._scheduler.batch.begin_take_over, hashes)

    def end_take_over(self, incoming: IncomingPrefix, blocks: int, turn: SessionTurn) -> None:
        """Close the transfer of a session: see `RunningBatch.end_take_over`."""
        self._thread.post(self._scheduler.batch.end_take_over, incoming, blocks, turn)

    def end_prefetch(self, incoming: IncomingPrefix, blocks: int, session_id: bytes) -> None:
        """Close a prefetch: see `RunningBatch.end_prefetch`."""
        self._thread.post(self._scheduler.batch.end_prefetch, incoming, blocks, session_id)

    def due_sessions(self, until_s: float, most: int, file_price: float) -> "Future[list[DueSession]]":
        """Return sessions to prefetch: see `EvictionOrder.due`. `file_price`: see `Sessions`."""
        return self._thread.call(_due_sessions, self._scheduler.pool.order, until_s, most, file_price)

    def kept(self) -> "Future[list[KeptBlocks]]":
        """Return the blocks of sessions whose next turn is expected, the soonest due first."""
        return self._thread.call(self._scheduler.pool.order.sessions.kept)

    @property
    def groups(self) -> BlockGroups:
        """Layer groups of the KV pool, each with its own blocks."""
        return self._scheduler.pool.groups

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Mark cached blocks of a queued request as just used, so that others are evicted first."""
        self._thread.post(self._scheduler.pool.touch_columns, hashes)

    def watch(self, hashes: Sequence[bytes]) -> Future[Watch]:
        """Watch cached blocks that another process reads, so that it can check later whether they were overwritten."""
        return self._thread.call(self._scheduler.pool.watch, hashes)

    def watch_each(self, hashes: Sequence[bytes]) -> Future[list[Watch]]:
        """Watch each block alone: see `BlockPool.watch_each`."""
        return self._thread.call(self._scheduler.pool.watch_each, hashes)

    def unwatch(self, watch: Watch) -> None:
        self._thread.post(self._scheduler.pool.unwatch, watch)

    def distrust(self, blocks: Sequence[int]) -> None:
        """Exclude blocks with possibly wrong KV from cache lookups: see `BlockPool.distrust`."""
        self._thread.post(self._scheduler.pool.distrust, blocks)

    def between_steps(self, function: Callable[..., Result], *arguments: Any) -> "Future[Result]":
        """Run a function before the next step. The future raises the function's exception, or EngineStopped."""
        return self._thread.call(function, *arguments)

    def observe_slow_down(self, slow_down: float) -> None:
        """Record the slow-down that a decode worker on the same GPU reports."""
        if self._engine.throttle is not None:
            self._thread.post(self._engine.throttle.observe_slow_down, slow_down)

    @property
    def slow_down(self) -> float:
        """Mean ratio of decode step times to their best time; 0 if unknown. Readable on any thread."""
        return self._engine.slow_down.ratio

    @property
    def steps(self) -> int:
        return self._thread.steps

    @property
    def turns(self) -> int | None:
        """Liveness counter of the thread: see `EngineThread.turns`. Readable on any thread."""
        return self._thread.turns

    @property
    def settings(self) -> Mapping[str, float]:
        """Settings that decide what a step computes, by name; flags are 0 or 1."""
        return {**self._scheduler.settings, "launches_ahead": float(self._engine.launches_ahead)}

    @property
    def load(self) -> EngineLoad:
        """Latest snapshot of the engine, created between two steps."""
        return self._thread.observed


def _due_sessions(order: EvictionOrder, until_s: float, most: int, file_price: float) -> list[DueSession]:
    order.sessions.file_price = file_price
    return order.due(until_s, most)


def _publish_cache_changes(pool: BlockPool, events: asyncio.AbstractEventLoop, on_cache: CacheHandler) -> None:
    """Report changes of the prefix cache immediately: routers must know of an eviction before the block is reused."""

    def publish() -> None:
        changes = journal.take()
        if changes is not None:
            on_cache(changes)

    journal = pool.keep_journal(lambda: _post(events, publish))


def _post(events: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    events.call_soon_threadsafe(function, *arguments)
