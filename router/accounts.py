"""Every request of this router from its beginning to its end: counted while it runs, traced when it has ended."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from router.outcomes import ANSWERED, Leave, Reader, RequestEnd, end_of, left
from router.request import Operation
from router.request_counts import RequestCounts
from router.request_record import RequestRecord
from router.tracing import Tracer
from service.errors import DeadlineExceeded
from service.trace_context import TraceContext

DEADLINE_SLACK_S = 0.02
"""gRPC ends a call at its client's deadline by its own clock: a call that ends so near to it has ended by that."""


class Accounts:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self.counts = RequestCounts()
        self._stopping = False  # running requests are cancelled
        self._idle = asyncio.Event()
        self._idle.set()

    async def idle(self) -> None:
        """Returns when all requests have ended. Where this is cancelled there is no time left: they are cancelled."""
        try:
            await self._idle.wait()
        except asyncio.CancelledError:
            self._stopping = True
            raise

    @contextmanager
    def request(
        self, record: RequestRecord, deadline_s: float, reader: Reader, life: asyncio.Timeout | None
    ) -> Iterator[None]:
        """One request, from its beginning to its end: the exception shows how it ended. `deadline_s`: a reading of the
        monotonic clock. `life`: as in Dispatcher.answer.
        """
        reader.requests += 1
        self._begin(record)
        try:
            yield
            end = ANSWERED
        except (asyncio.CancelledError, GeneratorExit):
            end = self._left(record, deadline_s, reader, life)
            raise
        except BaseException as error:
            end = end_of(error, record.timeline.attempts > 0)
            raise
        finally:
            self._end(record, end)

    def refuse(self, operation: Operation, parent: TraceContext | None, end: RequestEnd) -> None:
        """A call that ended before it became a request is counted, and leaves a trace."""
        record = RequestRecord.begin(operation, parent)
        self._begin(record)
        self._end(record, end)

    def _begin(self, record: RequestRecord) -> None:
        self.counts.begin(record)
        self._idle.clear()

    def _end(self, record: RequestRecord, end: RequestEnd) -> None:
        record.end = end
        self.counts.end(record, end)
        if self.counts.running == 0:
            self._idle.set()
        self._tracer.record(record)

    def _left(
        self, record: RequestRecord, deadline_s: float, reader: Reader, life: asyncio.Timeout | None
    ) -> RequestEnd:
        """Its events are read no more."""
        if record.summary is not None:
            return ANSWERED
        if life is not None and life.expired():
            return left(Leave.SUPERSEDED)
        if time.monotonic() >= deadline_s - DEADLINE_SLACK_S:
            return end_of(DeadlineExceeded(), record.timeline.attempts > 0)
        return left(Leave.STOPPING if self._stopping else reader.leaves)
