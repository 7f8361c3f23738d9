"""Run of one batch: its requests are answered concurrently, and each answer is written once."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from http import HTTPStatus
from itertools import islice
from typing import Any

from baton.router.http.batches.held import HeldBatch, StoredRequest, output_line
from baton.router.http.batches.line import LineAnswer
from baton.router.http.batches.records import CANCELLED, COMPLETED, EXPIRED
from baton.router.http.batches.threads import completed

CHECK_S = 1.0
"""Period in which progress is stored and cancellation is noticed, in seconds."""


class BatchRun:
    """Run of a batch. A line whose task another one cancels is answered again later."""

    def __init__(self, held: HeldBatch, answer: Callable[[StoredRequest], Coroutine[Any, Any, LineAnswer]]) -> None:
        """Create a run. `answer` answers a request."""
        self._held = held
        self._lines: dict[asyncio.Task[LineAnswer], StoredRequest] = {}
        self._answer = answer
        self._requests: Iterator[StoredRequest] = iter(())
        self._again = deque[StoredRequest]()
        self._stored = held.batch
        self._checked_s = 0.0

    async def answer_all(self, room: Callable[[], int], stops: Callable[[], bool]) -> str | None:
        """Answer the requests and return the batch's final status; None if the router stops before.

        `room`: number of lines that may be in flight, or a negative number to cancel the batch. `stops`: whether the
        router accepts no more requests. Raises: OSError.
        """
        self._requests = self._held.requests()
        try:
            while True:
                if (outcome := await self._decided(room)) is not None:
                    return outcome
                has_more = True if stops() else await self._begin(room())
                if not self._lines and stops():
                    return None
                if not self._lines and not has_more:
                    return COMPLETED
                await self._record_finished()
        finally:
            for line in self._lines:
                line.cancel()
            await asyncio.gather(*self._lines, return_exceptions=True)

    async def _decided(self, room: Callable[[], int]) -> str | None:
        """Store the progress, and return the final status if the batch was cancelled or has expired."""
        now_s = time.monotonic()
        if now_s < self._checked_s + CHECK_S:
            return None
        self._checked_s = now_s
        if self._held.batch != self._stored:
            self._stored = self._held.batch
            await completed(self._held.save, self._held.batch)
        if room() < 0 or await asyncio.to_thread(lambda: self._held.is_cancelled):
            return CANCELLED
        return EXPIRED if self._held.is_expired else None

    async def _begin(self, room: int) -> bool:
        """Begin as many lines as there is room for. Return False if no request is left."""
        free = room - len(self._lines)
        if free <= 0:
            return True
        found = [self._again.popleft() for _ in range(min(free, len(self._again)))]
        found += await completed(lambda: list(islice(self._requests, free - len(found))))
        for request in found:
            self._lines[asyncio.create_task(self._answer(request))] = request
        return bool(found)

    async def _record_finished(self) -> None:
        """Wait for a line, at most until the next check, and write its answer."""
        if not self._lines:
            await asyncio.sleep(CHECK_S)
            return
        finished, _ = await asyncio.wait(self._lines, timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED)
        for line in finished:
            request = self._lines.pop(line)
            if line.cancelled():
                self._again.append(request)
                continue
            answer = line.result()
            text = output_line(self._held.batch.id, request, answer.response)
            await completed(self._held.write, request, text, answer.status is not HTTPStatus.OK)
