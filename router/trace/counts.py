"""Every request of this router from its beginning to its end: counted while it runs, traced when it has ended.

started = the sum of all that have ended + running, at any moment.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

from baton.router.trace.record import ANSWERED, Leave, Outcome, Reader, RequestEnd, RequestRecord, end_of, left
from baton.router.trace.spans import Tracer
from baton.router.types.request import Operation
from baton.service.errors import DeadlineExceeded
from baton.service.telemetry.trace_context import TraceContext


class RequestCounts:
    """Of requests, by how they ended; of tokens, by model. Tokens count as they come, not at the end."""

    def __init__(self) -> None:
        self.started = 0
        self._running: dict[RequestRecord, None] = {}
        self._ended: Counter[tuple[Outcome, str]] = Counter()
        self._prompt_tokens: Counter[str] = Counter()  # of requests that have ended
        self._generated_tokens: Counter[str] = Counter()

    def begin(self, record: RequestRecord) -> None:
        self.started += 1
        self._running[record] = None

    def end(self, record: RequestRecord, end: RequestEnd) -> None:
        """Raises: KeyError for one that does not run."""
        del self._running[record]
        self._ended[end.outcome, end.reason] += 1
        self._prompt_tokens[record.model] += record.prompt_tokens
        self._generated_tokens[record.model] += record.completion_tokens

    def refuse(self, end: RequestEnd) -> None:
        """A call that was refused before there was a request."""
        self.started += 1
        self._ended[end.outcome, end.reason] += 1

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def ended(self) -> Mapping[tuple[Outcome, str], int]:
        """By outcome and reason."""
        return MappingProxyType(self._ended)

    @property
    def prompt_tokens(self) -> Counter[str]:
        """Of prompts that a worker was given. A resumed stream adds none: its prompt counted when it began."""
        return self._prompt_tokens + _sum({record: record.prompt_tokens for record in self._running})

    @property
    def generated_tokens(self) -> Counter[str]:
        """Tokens that went out; of an answer that is sent only at its end, tokens that were made."""
        return self._generated_tokens + _sum({record: record.completion_tokens for record in self._running})


def _sum(tokens: Mapping[RequestRecord, int]) -> Counter[str]:
    by_model: Counter[str] = Counter()
    for record, count in tokens.items():
        by_model[record.model] += count
    return by_model


WINDOW_S = 60.0
KEPT_REQUESTS = 256
KEPT_GAPS = 1024  # of one request, the newest
COUNTED_GAPS = 8192  # of all requests, the newest: sorting them takes a millisecond


class Quantiles(NamedTuple):
    p50_ms: float
    p99_ms: float


class Latency(NamedTuple):
    """`tbt` is None where no answer had a token after those of the first step."""

    requests: int
    ttft: Quantiles
    tbt: Quantiles | None


class _Ended(NamedTuple):
    at_s: float
    ttft_ms: float
    gaps_ms: list[float]


class RecentLatency:
    """`observe` is called with every request that has ended; those without a first token do not count."""

    def __init__(self) -> None:
        self._ended: deque[_Ended] = deque(maxlen=KEPT_REQUESTS)

    def observe(self, record: RequestRecord) -> None:
        timeline = record.timeline
        if timeline.first_token_s is None:
            return
        at_s = timeline.ended_s or timeline.last_token_s or timeline.first_token_s
        ttft_ms = (timeline.first_token_s - timeline.arrived_s) * 1e3
        self._ended.append(_Ended(at_s, ttft_ms, timeline.gaps.each_ms[-KEPT_GAPS:]))

    def figures(self, now: float) -> Latency | None:
        """`now` is in monotonic seconds. None where no request ended within WINDOW_S."""
        recent = [ended for ended in self._ended if now - ended.at_s <= WINDOW_S]
        if not recent:
            return None
        newest_gaps_ms = (gap_ms for ended in reversed(recent) for gap_ms in reversed(ended.gaps_ms))
        gaps_ms = list(islice(newest_gaps_ms, COUNTED_GAPS))
        return Latency(
            len(recent),
            quantiles(ended.ttft_ms for ended in recent),
            quantiles(gaps_ms) if gaps_ms else None,
        )


def quantiles(values_ms: Iterable[float]) -> Quantiles:
    """Of at least one value."""
    ordered = sorted(values_ms)
    return Quantiles(ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100])


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
