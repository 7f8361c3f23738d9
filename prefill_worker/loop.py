"""The engine of a prefill worker: prompts in, chunks and first tokens out, pages pinned until released."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from engine.engine import Engine, PlanRunner
from engine.engine_thread import EngineThread, StepTiming
from engine.pages import PageCounts
from engine.prefill_scheduler import PrefillProgress, PrefillRequest, PrefillScheduler

ProgressHandler = Callable[[Sequence[PrefillProgress], StepTiming], None]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """A picture of the engine between two steps."""

    pages: PageCounts
    held_by_sequences: int  # blocks
    held_by_transfers: int  # blocks
    waiting_requests: int
    running_sequences: int
    pending_tokens: int


class PrefillLoop:
    """Runs the engine on its thread and delivers progress on the event loop that built this object."""

    def __init__(
        self,
        runner: PlanRunner,
        scheduler: PrefillScheduler,
        on_progress: ProgressHandler,
        on_fault: Callable[[BaseException], None],
        prepare: Callable[[], None],
    ) -> None:
        events = asyncio.get_running_loop()

        def hand_over(outcomes: Sequence[PrefillProgress], timing: StepTiming) -> None:
            try:
                on_progress(outcomes, timing)
            except Exception as fault:
                logger.exception("the outcome of a step could not be taken in")
                on_fault(fault)

        def deliver(outcomes: Sequence[PrefillProgress], timing: StepTiming) -> None:
            events.call_soon_threadsafe(hand_over, outcomes, timing)

        def fail(fault: BaseException) -> None:
            events.call_soon_threadsafe(on_fault, fault)

        self._scheduler = scheduler
        self._thread: EngineThread[PrefillProgress, PrefillLoad] = EngineThread(
            Engine(runner, scheduler),
            on_step=deliver,
            on_fault=fail,
            observe=self._observe,
            prepare=prepare,
        )

    async def start(self) -> None:
        """Returns when the engine is warm. Raises: EngineStopped when it could not be warmed."""
        self._thread.start()
        await asyncio.wrap_future(self._thread.call(lambda: None))

    def stop(self, timeout_s: float) -> bool:
        return self._thread.stop(timeout_s)

    @property
    def steps(self) -> int:
        return self._thread.steps

    @property
    def load(self) -> PrefillLoad:
        return self._thread.observed

    def add(self, request: PrefillRequest) -> Future[None]:
        """Queues a prompt. The future raises RequestRefused, RequestTooLong."""
        return self._thread.call(self._scheduler.add, request)

    def abort(self, request_id: int) -> None:
        """Forgets a prompt in whatever phase and frees its pages; an unknown one is forgotten already."""
        self._thread.post(self._scheduler.abort, request_id)

    def _observe(self) -> PrefillLoad:
        scheduler = self._scheduler
        return PrefillLoad(
            scheduler.pool.counts,
            scheduler.held_by_sequences,
            scheduler.held_by_transfers,
            scheduler.waiting_requests,
            scheduler.running_sequences,
            scheduler.pending_tokens,
        )
