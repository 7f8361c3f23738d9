"""Events that the sessions have received for one attempt and its reader has not taken yet.

Bounded by the length of the answer: workers never send a token twice within a session, so a stalled client can hold no
more here than it asked for.
"""

import asyncio
from collections import deque
from typing import NamedTuple

from router.events import AttemptEvent
from router.loop_turns import LoopTurns


class Arrival(NamedTuple):
    event: AttemptEvent
    at_s: float  # monotonic


class Inbox:
    """One writer (a session), one reader (the request). `turns` are shared by all inboxes of a router."""

    def __init__(self, turns: LoopTurns) -> None:
        self._turns = turns
        self._arrivals: deque[Arrival] = deque()
        self._reader: asyncio.Future[None] | None = None  # waits for an arrival
        self._expired = False

    def put(self, event: AttemptEvent, now: float) -> None:
        self._arrivals.append(Arrival(event, now))
        self._wake()

    def expire(self) -> None:
        """Ends all waiting: a reader that waits now or later gets TimeoutError."""
        self._expired = True
        self._wake()

    @property
    def first(self) -> Arrival | None:
        """The oldest arrival, if there is any; it stays here."""
        return self._arrivals[0] if self._arrivals else None

    def take_first(self) -> Arrival:
        """Raises: IndexError without one."""
        return self._arrivals.popleft()

    async def take(self) -> Arrival:
        """The oldest arrival; waits for one. Raises: TimeoutError once expired."""
        while not self._arrivals:
            if self._expired:
                raise TimeoutError
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        await self._turns.take()
        if self._expired:
            raise TimeoutError
        return self._arrivals.popleft()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
