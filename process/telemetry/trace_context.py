"""W3C trace context, and id of the current task's request. Independent of OpenTelemetry."""

import re
import secrets
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Position in a trace: trace id and span id in lower-case hex, 32 and 16 digits."""

    trace_id: str
    span_id: str
    sampled: bool = True
    tracestate: str = ""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"

    def child(self) -> "TraceContext":
        """Return the context of a new span in the same trace."""
        return TraceContext(self.trace_id, secrets.token_hex(8), self.sampled, self.tracestate)


def new_trace() -> TraceContext:
    return TraceContext(secrets.token_hex(16), secrets.token_hex(8))


def parse_traceparent(traceparent: str | None, tracestate: str = "") -> TraceContext | None:
    """Parse a traceparent; None if it is missing or malformed: then a new trace begins, as W3C demands."""
    match = _TRACEPARENT.fullmatch(traceparent or "")
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, sampled=bool(int(flags, 16) & 1), tracestate=tracestate)


current_trace: ContextVar[TraceContext | None] = ContextVar("current_trace", default=None)
"""Caller's position in its trace; None outside of a call, or without a traceparent."""

current_request_id: ContextVar[str | None] = ContextVar("current_request_id", default=None)
"""Id of the current request, set by the code that learns it; None outside of a request."""


def in_trace(traceparent: str, request_id: str = "") -> Context:
    """Return a context whose `run` attributes functions, and the tasks and callbacks they start, to this trace and
    request.
    """
    context = copy_context()
    context.run(current_trace.set, parse_traceparent(traceparent))
    context.run(current_request_id.set, request_id or None)
    return context
