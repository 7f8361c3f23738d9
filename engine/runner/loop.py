"""An engine on its thread, as an event loop sees it: calls go in, the outcomes of steps come back as callbacks."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from baton.engine.kv_cache.block_pool import BlockPool, CacheChanges
from baton.engine.runner.thread import EngineThread, Steps, StepTiming

Outcome = TypeVar("Outcome")
Load = TypeVar("Load")
CacheHandler = Callable[[CacheChanges], None]
logger = logging.getLogger(__name__)


class EngineLoop(Generic[Outcome, Load]):
    """Base of the workers' loops, which add the calls of their scheduler.

    `on_outcomes` and `on_fault` are called on the event loop that builds this object, and so is `on_cache`, if given:
    a step's changes of the prefix cache come before the step's outcomes. `observe` makes, on the engine's thread, the
    value that `load` then shows.
    """

    def __init__(
        self,
        engine: Steps[Outcome],
        on_outcomes: Callable[[Sequence[Outcome], StepTiming], None],
        on_fault: Callable[[BaseException], None],
        observe: Callable[[], Load],
        prepare: Callable[[], None],
        pool: BlockPool | None = None,
        on_cache: CacheHandler | None = None,
        on_busy: Callable[[bool], None] = lambda busy: None,
    ) -> None:
        """`pool`: the one whose cache `on_cache` follows. `on_busy`: see `EngineThread`."""
        events = asyncio.get_running_loop()

        def hand_over(outcomes: Sequence[Outcome], timing: StepTiming) -> None:
            try:
                on_outcomes(outcomes, timing)
            except Exception as fault:
                logger.exception("the outcome of a step could not be taken in")
                on_fault(fault)

        self._thread: EngineThread[Outcome, Load] = EngineThread(
            engine,
            on_step=lambda outcomes, timing: _post(events, hand_over, outcomes, timing),
            on_fault=lambda fault: _post(events, on_fault, fault),
            observe=observe,
            prepare=prepare,
            on_busy=on_busy,
        )
        if pool is not None and on_cache is not None:
            _publish_cache_changes(pool, events, on_cache)

    async def start(self) -> None:
        """Returns when the engine is warm. Raises: EngineStopped when it could not be warmed."""
        self._thread.start()
        await asyncio.wrap_future(self._thread.call(lambda: None))

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the step it is in. Returns whether it ended in time."""
        return self._thread.stop(timeout_s)

    @property
    def steps(self) -> int:
        return self._thread.steps

    @property
    def turns(self) -> int | None:
        """See `EngineThread.turns`. On any thread."""
        return self._thread.turns

    @property
    def load(self) -> Load:
        """The engine as it was between its last two steps."""
        return self._thread.observed


def _publish_cache_changes(pool: BlockPool, events: asyncio.AbstractEventLoop, on_cache: CacheHandler) -> None:
    """At once, not after the step: routers should know of an eviction before the block is filled anew."""

    def tell() -> None:
        changes = journal.take()
        if changes is not None:
            on_cache(changes)

    journal = pool.keep_journal(lambda: _post(events, tell))


def _post(events: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    events.call_soon_threadsafe(function, *arguments)
