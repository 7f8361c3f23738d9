"""What the sessions have received for one attempt and its reader has not taken yet.

Bounded by the length of the answer: workers never say a token twice within a session, so a stalled client can hold no
more here than it asked for.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

from router.events import AttemptEvent


@dataclass(frozen=True, slots=True)
class Arrival:
    event: AttemptEvent
    at_s: float  # monotonic


class Inbox:
    """One writer (a session), one reader (the request)."""

    def __init__(self) -> None:
        self._arrivals: deque[Arrival] = deque()
        self._filled = asyncio.Event()

    def put(self, event: AttemptEvent, now: float) -> None:
        self._arrivals.append(Arrival(event, now))
        self._filled.set()

    async def take(self) -> Arrival:
        """The oldest arrival; waits for one. The caller bounds the wait."""
        while not self._arrivals:
            self._filled.clear()
            await self._filled.wait()
        return self._arrivals.popleft()
