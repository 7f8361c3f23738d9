"""Prefetch of expected user sessions: blocks that the pool lacks are loaded from the KV tier before the next turn.

Loads replace only unprotected blocks and take a small share of the reading thread's time, since waiting prompts come
first.
"""

import asyncio
import logging
import time

from baton.engine.runner.loop import EngineLoop
from baton.engine.runner.thread import EngineStopped
from baton.worker.tier.restorer import TierRestorer

logger = logging.getLogger(__name__)
PERIOD_S = 0.5
LEAD_S = 3.0  # time before an expected turn at which its blocks are loaded
AT_ONCE = 8  # maximum number of sessions per period
REST = 3.0  # pause after a load, as a multiple of its duration


class Prefetcher:
    """Periodic prefetch of expected sessions from the KV tier. Lives on the event loop."""

    def __init__(self, loop: EngineLoop, restorer: TierRestorer) -> None:
        self._loop = loop
        self._restorer = restorer

    async def run(self) -> None:
        """Prefetch periodically until cancelled or until the engine has stopped."""
        try:
            while True:
                await asyncio.sleep(PERIOD_S)
                await self._round()
        except EngineStopped as error:
            logger.info("sessions are no longer prefetched: %s", error)

    async def _round(self) -> None:
        """Load blocks of the sessions that are due. Raises: EngineStopped."""
        until_s = time.monotonic() + LEAD_S
        asked = self._loop.due_sessions(until_s, AT_ONCE, self._restorer.price)
        for due in await asyncio.wrap_future(asked):
            began_s = time.monotonic()
            await self._restorer.prefetch(due.session_id, due.names)
            await asyncio.sleep(REST * (time.monotonic() - began_s))
