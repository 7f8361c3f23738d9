"""Times of a request on this worker, and the newest requests. For traces and timelines. Does no I/O."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

KEPT_REQUESTS = 1024
KEPT_CHUNKS = 64  # of one prompt; the last one counts for all after it


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
    """Load of KV from files. Monotonic seconds."""

    began_s: float
    ended_s: float
    tokens: int
    bytes: int


@dataclass(slots=True)
class RequestTimes:
    """Times of one request in monotonic seconds; None: not reached."""

    number: int = 0  # on this worker, as in the records of steps
    request_id: str = ""
    traceparent: str = ""
    router_id: bytes = b""
    arrived_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    chunks: list[ChunkTime] = field(default_factory=list)
    restore: RestoreTime | None = None
    transfer: TransferTime | None = None
    first_step_s: float | None = None  # its first token was sent: of the prompt, or of the answer where KV was received
    last_token_s: float | None = None
    tokens: int = 0  # of the answer, made here
    drafted_tokens: int = 0  # computed beside the newest ones
    accepted_tokens: int = 0  # of those, the ones that were drawn
    failure: str = ""
    ended_s: float | None = None  # nothing is held for it any more

    def add_chunk(self, began_s: float, ended_s: float, tokens: int) -> None:
        if len(self.chunks) < KEPT_CHUNKS:
            self.chunks.append(ChunkTime(began_s, ended_s, tokens))
        else:
            last = self.chunks[-1]
            self.chunks[-1] = ChunkTime(last.began_s, ended_s, last.tokens + tokens)

    def add_tokens(self, tokens: int, ended_s: float) -> None:
        """Add tokens of the answer, generated in the step that ended then."""
        self.tokens += tokens
        self.last_token_s = ended_s
        if self.first_step_s is None:
            self.first_step_s = ended_s


class RequestLog:
    """Open requests and the newest finished ones."""

    def __init__(
        self,
        now: Callable[[], float] = lambda: time.monotonic(),
        on_end: Callable[[RequestTimes], None] = lambda times: None,
    ) -> None:
        """Create a log. `on_end` is called with each request that has finished."""
        self._now = now
        self._on_end = on_end
        self._open: dict[int, RequestTimes] = {}
        self._ended: OrderedDict[int, RequestTimes] = OrderedDict()

    def begin(self, times: RequestTimes) -> None:
        self._open[times.number] = times

    def end(self, times: RequestTimes) -> None:
        """Close a request, which may be closed already."""
        if self._open.pop(times.number, None) is None:
            return
        times.ended_s = self._now()
        self._ended[times.number] = times
        if len(self._ended) > KEPT_REQUESTS:
            self._ended.popitem(last=False)
        self._on_end(times)

    def since(self, began_s: float) -> Iterator[RequestTimes]:
        """Yield requests that were here after that moment, in the order of their arrival."""
        ended = (times for times in self._ended.values() if (times.ended_s or 0.0) >= began_s)
        yield from sorted([*ended, *self._open.values()], key=lambda times: times.number)
