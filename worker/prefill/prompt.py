"""One prompt on a prefill worker: its state beside the engine's, and its messages to the router."""

import asyncio
import time
from dataclasses import dataclass, field

from baton.engine.runner.thread import StepTiming
from baton.engine.scheduler.sequences import PromptComputed
from baton.protos import session_pb2
from baton.service.sessions.hub import RouterSession
from baton.worker.prefill.fetch import NOTHING_FETCHED, Fetched
from baton.worker.wire import first_output, prompt_scores

Session = RouterSession[session_pb2.ConnectResponse]


@dataclass(eq=False)
class Prompt:
    """One Prefill command, from its arrival until its pages are unpinned."""

    request_id: int  # this worker's own: two routers may use the same attempt id
    session: Session
    attempt_id: int
    transfer_id: bytes
    arrived: float  # monotonic seconds
    with_logprobs: bool  # whether the router wants them
    searches: bool  # with beams, whose first tokens are not yet an answer's
    answered_tokens: int  # of the answer, given out by an earlier attempt
    deadline: asyncio.TimerHandle | None = None
    compiling: "asyncio.Task[None] | None" = None
    fetching: "asyncio.Task[None] | None" = None
    fetched: Fetched = NOTHING_FETCHED
    computed_tokens: int = 0  # cached ones included
    queue_ms: float = 0.0
    chunk_ms: list[float] = field(default_factory=list)
    scored_tokens: int = 0  # of the prompt, after its first: their log-probabilities were sent to the router

    def record(self, advance: PromptComputed, timing: StepTiming) -> int:
        """Takes in a step's progress on this prompt; returns the tokens that the step computed of it."""
        if not self.chunk_ms:
            self.queue_ms = (timing.started - self.arrived) * 1e3
        self.chunk_ms.append(timing.duration_ms)
        tokens = advance.computed_tokens - max(self.computed_tokens, advance.cached_tokens)
        self.computed_tokens = advance.computed_tokens
        return tokens

    def scores(self, advance: PromptComputed) -> session_pb2.PromptScores | None:
        """A step's scores of the prompt's own tokens, if any."""
        if not advance.prompt:
            return None
        offset = 1 + self.scored_tokens
        self.scored_tokens += len(advance.prompt)
        return prompt_scores(self.attempt_id, offset, advance.prompt)

    def first_step(self, advance: PromptComputed) -> session_pb2.FirstStep:
        """The message with the first token of every choice."""
        timings = session_pb2.PrefillTimings(
            queue_ms=self.queue_ms,
            chunk_ms=self.chunk_ms,
            total_ms=(time.monotonic() - self.arrived) * 1e3,
            cached_tokens=advance.cached_tokens,
            fetch_ms=self.fetched.duration_ms,
            fetched_tokens=self.fetched.tokens,
            fetch_bytes=self.fetched.bytes,
            fetch_transport=self.fetched.transport,
        )
        reported = () if self.searches else advance.first or ()
        answered_tokens = self.answered_tokens
        outputs = [first_output(self.attempt_id, first, self.with_logprobs, answered_tokens) for first in reported]
        return session_pb2.FirstStep(attempt_id=self.attempt_id, outputs=outputs, timings=timings)

    def let_go(self) -> None:
        """Cancels its deadline and the tasks that it waits for."""
        if self.deadline is not None:
            self.deadline.cancel()
        for task in (self.compiling, self.fetching):
            if task is not None:
                task.cancel()
