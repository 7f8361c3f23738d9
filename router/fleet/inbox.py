"""Events of one request, received by sessions or its own, that it has not taken yet.

A session reads one message a turn. If all streams wrote the tokens of one message before the next one is read, a router
at full load would fall behind with the reading, and the workers' messages would pile up in the workers. So the rest of
the streams wait for later turns; meanwhile more tokens arrive for them, and go out as one message.

Bounded by the length of the answer: workers never send a token twice within a session, so a stalled client can hold no
more here than it asked for.
"""

import asyncio
from collections import deque
from typing import Generic, NamedTuple, TypeVar

from baton.router.types.events import AttemptEvent

AT_ONCE = 8


class WakeUpLimiter:
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


class Arrival(NamedTuple):
    event: AttemptEvent
    at_s: float  # monotonic


Own = TypeVar("Own")


class Inbox(Generic[Own]):
    """Of one request: what workers send about its attempts, and its own events. `wake_ups` are those of the router."""

    def __init__(self, wake_ups: WakeUpLimiter) -> None:
        self._wake_ups = wake_ups
        self._arrivals: deque[Arrival] = deque()
        self._own: deque[Own] = deque()
        self._reader: asyncio.Future[None] | None = None  # waits for an event

    def put(self, event: AttemptEvent, now: float) -> None:
        self._arrivals.append(Arrival(event, now))
        self._wake()

    def put_own(self, event: Own) -> None:
        """It goes before all that workers have sent, and waits for no turn."""
        self._own.append(event)
        self._wake()

    @property
    def first(self) -> Arrival | None:
        """The oldest arrival, if there is any; it stays here."""
        return self._arrivals[0] if self._arrivals else None

    def take_first(self) -> Arrival:
        """Raises: IndexError without one."""
        return self._arrivals.popleft()

    async def take(self) -> Arrival | Own:
        """The next event; waits for one."""
        while not self._own and not self._arrivals:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if not self._own:
            await self._wake_ups.take()
        return self._own.popleft() if self._own else self._arrivals.popleft()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
