"""The record of one request, from its arrival to its end: for its trace, the counters and the page."""

from dataclasses import dataclass, field

from router.outcomes import RequestEnd
from router.received import Making
from router.request import Operation, PreparedRequest
from router.response import Summary
from router.timeline import Timeline
from service.telemetry import WallClock
from service.trace_context import TraceContext, new_trace


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Filled in on the request's way. `identity` is the root span's place in the trace."""

    operation: Operation
    parent: TraceContext | None
    identity: TraceContext
    clock: WallClock
    timeline: Timeline
    model: str = ""
    prepared: PreparedRequest | None = None
    finish_reasons: list[str] = field(default_factory=list)
    summary: Summary | None = None
    is_resumed: bool = False  # an answer that began in another stream
    answer: Making | None = None
    delivered_tokens: int = 0  # of deltas that went out
    end: RequestEnd | None = None  # None: it runs

    @property
    def error(self) -> str | None:
        """Name of the status that it ended with; None is OK."""
        return self.end.error if self.end is not None else None

    @property
    def prompt_tokens(self) -> int:
        """That a worker was given for this request, and not for one that it resumes."""
        given = self.prepared is not None and self.timeline.attempts and not self.is_resumed
        return len(self.prepared.token_ids) if self.prepared is not None and given else 0

    @property
    def completion_tokens(self) -> int:
        """Tokens that went out; of an answer that is sent only at its end, tokens that were made. Those that the client
        of a resumed stream had before are not included.
        """
        whole_at_once = self.prepared is not None and not self.prepared.valid.streams
        return self.answer.completion_tokens if whole_at_once and self.answer is not None else self.delivered_tokens

    @staticmethod
    def begin(operation: Operation, parent: TraceContext | None) -> "RequestRecord":
        clock = WallClock.now()
        identity = parent.child() if parent else new_trace()
        return RequestRecord(operation, parent, identity, clock, Timeline(arrived_s=clock.monotonic_s))
