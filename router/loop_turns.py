"""How many streams go on in one turn of the event loop: few enough that what comes in is read in between.

A session reads one message a turn. If all streams wrote what one message brought before the next one is read, a router
that has no time left would fall behind with the reading, and what workers say would pile up in them. So the rest of
the streams wait for later turns; meanwhile more tokens come for them, and go out as one message.
"""

import asyncio
from collections import deque

AT_ONCE = 8


class LoopTurns:
    """Whoever waits goes on in the order of coming."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._left = at_once  # of this turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._renews = False

    async def take(self) -> None:
        """Returns at once where few have come in this turn."""
        loop = asyncio.get_running_loop()
        if not self._renews:
            self._renews = True
            loop.call_soon(self._renew)
        if self._left > 0:
            self._left -= 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _renew(self) -> None:
        """A new turn: as many as it takes of those that wait."""
        self._left = self._at_once
        while self._waiting and self._left > 0:
            place = self._waiting.popleft()
            if not place.done():  # else its owner was cancelled
                place.set_result(None)
                self._left -= 1
        self._renews = self._left < self._at_once
        if self._renews:
            asyncio.get_running_loop().call_soon(self._renew)
