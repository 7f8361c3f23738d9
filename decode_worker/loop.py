"""The engine of a decode worker: pages reserved, landed prompts activated, one batch of tokens out per step."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from engine.decode_scheduler import DecodeRequest, DecodeScheduler, Reservation, SequenceStep
from engine.engine import Engine, PlanRunner
from engine.engine_thread import EngineThread, StepTiming
from engine.pages import PageCounts
from engine.sequence import FirstToken

StepHandler = Callable[[Sequence[SequenceStep], StepTiming], None]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """A picture of the engine between two steps."""

    pages: PageCounts
    held_by_sequences: int  # blocks
    held_by_transfers: int  # blocks
    running_sequences: int


class DecodeLoop:
    """Runs the engine on its thread and delivers steps on the event loop that built this object."""

    def __init__(
        self,
        runner: PlanRunner,
        scheduler: DecodeScheduler,
        on_steps: StepHandler,
        on_fault: Callable[[BaseException], None],
        prepare: Callable[[], None],
    ) -> None:
        events = asyncio.get_running_loop()

        def hand_over(outcomes: Sequence[SequenceStep], timing: StepTiming) -> None:
            try:
                on_steps(outcomes, timing)
            except Exception as fault:
                logger.exception("the outcome of a step could not be taken in")
                on_fault(fault)

        def deliver(outcomes: Sequence[SequenceStep], timing: StepTiming) -> None:
            events.call_soon_threadsafe(hand_over, outcomes, timing)

        def fail(fault: BaseException) -> None:
            events.call_soon_threadsafe(on_fault, fault)

        self._scheduler = scheduler
        self._thread: EngineThread[SequenceStep, DecodeLoad] = EngineThread(
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
    def load(self) -> DecodeLoad:
        return self._thread.observed

    def reserve(self, request: DecodeRequest) -> "Future[Reservation | None]":
        """Takes pages for a prompt; None when there is no room now. The future raises RequestTooLong."""
        return self._thread.call(self._scheduler.reserve, request)

    def activate(self, request_id: int, first_tokens: Sequence[FirstToken]) -> Future[None]:
        """The KV of the whole prompt has landed: its sequences join the batch at the next step."""
        return self._thread.call(self._scheduler.activate, request_id, first_tokens)

    def abort(self, request_id: int) -> None:
        """Frees a request in whatever phase, before any later call is carried out; an unknown one is free already.

        No copy into its pages may be under way.
        """
        self._thread.post(self._scheduler.abort, request_id)

    def _observe(self) -> DecodeLoad:
        scheduler = self._scheduler
        return DecodeLoad(
            scheduler.pool.counts,
            scheduler.held_by_sequences,
            scheduler.held_by_transfers,
            scheduler.running_sequences,
        )
