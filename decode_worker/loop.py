"""The engine of a decode worker: pages reserved, landed prompts activated, one batch of tokens out per step."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from engine.decode_scheduler import DecodeRequest, DecodeScheduler, Reservation, SequenceStep
from engine.engine import Engine, PlanRunner
from engine.engine_loop import EngineLoop
from engine.engine_thread import StepTiming
from engine.pages import PageCounts
from engine.sequence import FirstToken

StepHandler = Callable[[Sequence[SequenceStep], StepTiming], None]


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """A picture of the engine between two steps."""

    pages: PageCounts
    held_by_sequences: int  # blocks
    held_by_transfers: int  # blocks
    running_sequences: int


class DecodeLoop(EngineLoop[SequenceStep, DecodeLoad]):
    def __init__(
        self,
        runner: PlanRunner,
        scheduler: DecodeScheduler,
        on_steps: StepHandler,
        on_fault: Callable[[BaseException], None],
        prepare: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        super().__init__(Engine(runner, scheduler), on_steps, on_fault, self._observe, prepare)

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
