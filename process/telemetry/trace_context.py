"""W3C trace context, and which request the current task works for (read by logs). Knows no OpenTelemetry."""

import re
import secrets
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A place in a trace: ids in lower-case hex, 32 and 16 digits."""

    trace_id: str
    span_id: str
    sampled: bool = True
    tracestate: str = ""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"

    def child(self) -> "TraceContext":
        """A new span in the same trace."""
        return TraceContext(self.trace_id, secrets.token_hex(8), self.sampled, self.tracestate)


def new_trace() -> TraceContext:
    return TraceContext(secrets.token_hex(16), secrets.token_hex(8))


def parse_traceparent(traceparent: str | None, tracestate: str = "") -> TraceContext | None:
    """Parse a traceparent; None if missing or malformed: a bad header must not harm a request (W3C: start a new
    trace).
    """
    match = _TRACEPARENT.fullmatch(traceparent or "")
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, sampled=bool(int(flags, 16) & 1), tracestate=tracestate)


current_trace: ContextVar[TraceContext | None] = ContextVar("current_trace", default=None)
"""The caller's place in its trace, None outside a call or where none was given."""

current_request_id: ContextVar[str | None] = ContextVar("current_request_id", default=None)
"""Set by the code that learns the request's id; None outside a request."""


def in_trace(traceparent: str, request_id: str = "") -> Context:
    """Return a context for `run`, in which functions, and the tasks and callbacks that they start, belong to that
    request.
    """
    context = copy_context()
    context.run(current_trace.set, parse_traceparent(traceparent))
    context.run(current_request_id.set, request_id or None)
    return context
