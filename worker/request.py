"""Open requests of a worker of either role, and prompts while they are computed. Does no I/O."""

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from baton.engine.request import FirstToken
from baton.engine.runner.step_records import StepTiming
from baton.engine.scheduler.sequences import PromptComputed
from baton.process.links.hub import RouterLink
from baton.protos import session_pb2
from baton.worker.tier.restorer import NOTHING_RESTORED, Restored
from baton.worker.times import RequestTimes
from baton.worker.wire import first_output, prompt_scores

Link = RouterLink[session_pb2.ConnectResponse]


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """Identity of an attempt on a worker: two routers may use equal attempt ids."""

    router_id: bytes
    attempt_id: int


@dataclass(eq=False)
class OpenRequest:
    """Request whose command has arrived and whose resources are not all released yet."""

    request_id: int  # unique on this worker, unlike the attempt id
    link: Link
    attempt_id: int
    deadline: asyncio.TimerHandle | None = field(default=None, kw_only=True)
    times: RequestTimes = field(default_factory=RequestTimes, kw_only=True)
    adapter: int = field(default=0, kw_only=True)  # adapter's number in the engine; 0: no adapter

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.link.router_id, self.attempt_id)

    def let_go(self) -> None:
        """Cancel timers and tasks of the request."""
        if self.deadline is not None:
            self.deadline.cancel()


Open = TypeVar("Open", bound=OpenRequest)


class RequestTable(Generic[Open]):
    """Open requests, found by request id or by attempt."""

    def __init__(self) -> None:
        self._requests: dict[int, Open] = {}
        self._by_attempt: dict[AttemptKey, Open] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Open]:
        """Iterate over a copy: the table may change during the iteration."""
        return iter(tuple(self._requests.values()))

    def __contains__(self, request: Open) -> bool:
        return request.request_id in self._requests

    def add(self, request: Open) -> None:
        self._requests[request.request_id] = request
        self._by_attempt[request.key] = request

    def get(self, request_id: int) -> Open | None:
        return self._requests.get(request_id)

    def of_attempt(self, key: AttemptKey) -> Open | None:
        return self._by_attempt.get(key)

    def forget(self, request: Open) -> None:
        """Remove a request, which may be removed already."""
        if self._requests.pop(request.request_id, None) is not None:
            del self._by_attempt[request.key]


@dataclass(slots=True)
class PromptProgress:
    """Progress of a prompt that this worker computes, until its first tokens are sent to the router."""

    arrived: float  # monotonic seconds
    queue_ms: float = 0.0  # time from arrival until the first chunk began
    chunk_ms: list[float] = field(default_factory=list)
    computed_tokens: int = 0  # including cached tokens
    cached_tokens: int = 0
    scored_tokens: int = 0  # prompt tokens, after the first, whose log-probabilities were sent
    ended: bool = False
    first: list[FirstToken] = field(default_factory=list)
    restored: Restored = NOTHING_RESTORED

    def record(self, computed: PromptComputed, timing: StepTiming) -> int:
        """Record a computed chunk; return its number of tokens."""
        if not self.chunk_ms:
            self.queue_ms = max(0.0, timing.started - self.arrived) * 1e3
        self.chunk_ms.append(timing.duration_ms)
        tokens = computed.computed_tokens - max(self.computed_tokens, computed.cached_tokens)
        self.computed_tokens, self.cached_tokens = computed.computed_tokens, computed.cached_tokens
        self.ended = computed.ended
        return tokens

    def scores(self, attempt_id: int, computed: PromptComputed) -> session_pb2.ConnectResponse | None:
        """Return the message with the log-probabilities of a step's prompt tokens; None if there are none."""
        if not computed.prompt:
            return None
        offset = 1 + self.scored_tokens
        self.scored_tokens += len(computed.prompt)
        return session_pb2.ConnectResponse(prompt_scores=prompt_scores(attempt_id, offset, computed.prompt))

    def first_step(
        self, attempt_id: int, first: Iterable[FirstToken], with_logprobs: bool, answered_tokens: int
    ) -> session_pb2.FirstStep:
        """Return the message with the first token of every choice."""
        timings = session_pb2.PrefillTimings(
            queue_ms=self.queue_ms,
            chunk_ms=self.chunk_ms,
            total_ms=(time.monotonic() - self.arrived) * 1e3,
            cached_tokens=self.cached_tokens,
            restore_ms=self.restored.duration_ms,
            restored_tokens=self.restored.tokens,
        )
        outputs = [first_output(attempt_id, token, with_logprobs, answered_tokens) for token in first]
        return session_pb2.FirstStep(attempt_id=attempt_id, outputs=outputs, timings=timings)
