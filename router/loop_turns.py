"""How many streams continue in one turn of the event loop: few enough that sessions are read in between.

A session reads one message a turn. If all streams wrote the tokens of one message before the next one is read, a router
at full load would fall behind with the reading, and the workers' messages would pile up in the workers. So the rest of
the streams wait for later turns; meanwhile more tokens arrive for them, and go out as one message.
"""

import asyncio
from collections import deque

AT_ONCE = 8


class LoopTurns:
    """Streams that wait continue in the order of arrival."""

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
