"""Times of a request on this worker, for traces and timelines, and a log of the newest requests. Does no I/O."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.engine.request import NO_OBJECTIVES, Objectives

KEPT_REQUESTS = 1024
KEPT_CHUNKS = 64  # maximum number of chunks per prompt; the last one covers all later chunks


class ChunkTime(NamedTuple):
    """Part of a prompt that was computed in one step. Monotonic seconds."""

    began_s: float
    ended_s: float
    tokens: int


class TransferTime(NamedTuple):
    """Pull of KV from another worker. Monotonic seconds."""

    began_s: float
    ended_s: float
    source: str  # host:port
    bytes: int
    transport: str


class RestoreTime(NamedTuple):
    """Load of KV from the KV tier. Monotonic seconds."""

    began_s: float
    ended_s: float
    tokens: int
    bytes: int


@dataclass(slots=True)
class RequestTimes:
    """Times of one request in monotonic seconds; None: not reached."""

    number: int = 0  # request number on this worker, as in step records
    request_id: str = ""
    traceparent: str = ""
    router_id: bytes = b""
    arrived_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    chunks: list[ChunkTime] = field(default_factory=list)
    restore: RestoreTime | None = None
    transfer: TransferTime | None = None
    first_step_s: float | None = None  # end of the step with the first token generated on this worker
    last_token_s: float | None = None
    tokens: int = 0  # answer tokens generated on this worker
    drafted_tokens: int = 0  # drafted tokens that steps computed
    accepted_tokens: int = 0  # drafted tokens that sampling accepted
    objectives: Objectives = NO_OBJECTIVES
    failure: str = ""
    ended_s: float | None = None  # time when its resources were released

    def add_chunk(self, began_s: float, ended_s: float, tokens: int) -> None:
        if len(self.chunks) < KEPT_CHUNKS:
            self.chunks.append(ChunkTime(began_s, ended_s, tokens))
        else:
            last = self.chunks[-1]
            self.chunks[-1] = ChunkTime(last.began_s, ended_s, last.tokens + tokens)

    def add_tokens(self, tokens: int, ended_s: float) -> None:
        """Add tokens of the answer that were generated in a step that ended at `ended_s`."""
        self.tokens += tokens
        self.last_token_s = ended_s
        if self.first_step_s is None:
            self.first_step_s = ended_s


class RequestLog:
    """Log of open requests and the newest finished ones."""

    def __init__(
        self,
        now: Callable[[], float] = lambda: time.monotonic(),
        on_end: Callable[[RequestTimes], None] = lambda times: None,
    ) -> None:
        """Create a log. `on_end` is called with each finished request."""
        self._now = now
        self._on_end = on_end
        self._open: dict[int, RequestTimes] = {}
        self._ended: OrderedDict[int, RequestTimes] = OrderedDict()

    def begin(self, times: RequestTimes) -> None:
        self._open[times.number] = times

    def end(self, times: RequestTimes) -> None:
        """Record the end of a request; do nothing if it is recorded already."""
        if self._open.pop(times.number, None) is None:
            return
        times.ended_s = self._now()
        self._ended[times.number] = times
        if len(self._ended) > KEPT_REQUESTS:
            self._ended.popitem(last=False)
        self._on_end(times)

    def since(self, began_s: float) -> Iterator[RequestTimes]:
        """Yield the requests that were open at `began_s` or later, in the order of their arrival."""
        ended = (times for times in self._ended.values() if (times.ended_s or 0.0) >= began_s)
        yield from sorted([*ended, *self._open.values()], key=lambda times: times.number)
