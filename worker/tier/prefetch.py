"""Sessions that are expected soon: what the pool lacks of them is loaded from files before their next turn comes.

It takes only unprotected room, and a small share of the time of the thread that reads, since
prompts that are here need it more.
"""

import asyncio
import logging
import time

from baton.engine.runner.loop import EngineLoop
from baton.engine.runner.thread import EngineStopped
from baton.worker.tier.restorer import TierRestorer

logger = logging.getLogger(__name__)
PERIOD_S = 0.5
LEAD_S = 3.0  # before a turn is expected, its blocks are looked for
AT_ONCE = 8  # sessions, in a period
REST = 3.0  # times as long as a load took, none begins


class Prefetcher:
    """Lives on the event loop."""

    def __init__(self, loop: EngineLoop, restorer: TierRestorer) -> None:
        self._loop = loop
        self._restorer = restorer

    async def run(self) -> None:
        """Run until cancelled, or until the engine has stopped."""
        try:
            while True:
                await asyncio.sleep(PERIOD_S)
                await self._round()
        except EngineStopped as error:
            logger.info("no sessions are loaded ahead any more: %s", error)

    async def _round(self) -> None:
        """Load blocks of sessions. Raises: EngineStopped."""
        until_s = time.monotonic() + LEAD_S
        asked = self._loop.due_sessions(until_s, AT_ONCE, self._restorer.price)
        for due in await asyncio.wrap_future(asked):
            began_s = time.monotonic()
            await self._restorer.prefetch(due.session_id, due.names)
            await asyncio.sleep(REST * (time.monotonic() - began_s))
