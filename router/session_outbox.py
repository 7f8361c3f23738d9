"""Messages that a connection with a worker has still to write: in order, adjacent cancels in one message."""

import asyncio
from collections import deque

from protos import session_pb2

MOST_TOGETHER = 256  # commands of a message: a worker takes them in without looking up


class SessionOutbox:
    """`put` never waits. A burst of cancels is one thing to do for a worker, and is there at once."""

    def __init__(self) -> None:
        self._waiting: deque[session_pb2.ConnectRequest] = deque()
        self._changed = asyncio.Event()

    def put(self, command: session_pb2.ConnectRequest) -> None:
        self._waiting.append(command)
        self._changed.set()

    async def next(self) -> session_pb2.ConnectRequest:
        """Waits for the next message. Messages that were put are not changed: they may have to be sent again."""
        while not self._waiting:
            self._changed.clear()
            await self._changed.wait()
        first = self._waiting.popleft()
        if not (first.HasField("cancel") and self._next_is_cancel):
            return first
        cancels = [first]
        while self._next_is_cancel and len(cancels) < MOST_TOGETHER:
            cancels.append(self._waiting.popleft())
        return session_pb2.ConnectRequest(commands=session_pb2.Commands(commands=cancels))

    @property
    def _next_is_cancel(self) -> bool:
        return bool(self._waiting) and self._waiting[0].HasField("cancel")
