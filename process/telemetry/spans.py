"""Spans, handed over when they are finished: stages are measured as durations and drawn once a request has ended.

Without OpenTelemetry, or with nowhere to send to, all of it is a no-op. Nothing here blocks or fails a request.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from baton.process.telemetry.trace_context import TraceContext, new_trace

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
Attributes = Mapping[str, AttributeValue]


class SpanKind(StrEnum):
    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class SpanEvent:
    name: str
    time_ns: int
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FinishedSpan:
    """Stage of a request. Times are wall-clock nanoseconds, both from one WallClock.

    `identity` is the span's own place in the trace where it was given away before the span ended (as traceparent);
    None takes a fresh one under `parent`. A span with neither begins a trace.
    """

    name: str
    start_ns: int
    end_ns: int
    parent: TraceContext | None = None
    identity: TraceContext | None = None
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Attributes = field(default_factory=dict)
    events: Sequence[SpanEvent] = ()
    links: Sequence[TraceContext] = ()
    error: str | None = None  # the error; None is success


@dataclass(frozen=True, slots=True)
class WallClock:
    """Wall-clock times of one request, anchored once at its start and advanced by the monotonic clock only."""

    wall_ns: int
    monotonic_s: float

    @staticmethod
    def now() -> "WallClock":
        return WallClock(time.time_ns(), time.monotonic())

    def at(self, monotonic_s: float) -> int:
        """Nanoseconds since the epoch at a reading of time.monotonic()."""
        return self.wall_ns + round((monotonic_s - self.monotonic_s) * 1e9)


class Telemetry(Protocol):
    """Called from one thread."""

    def span(self, span: FinishedSpan) -> TraceContext:
        """Take a finished span and return its place in the trace, for its children."""

    def close(self) -> None:
        """Send the remaining spans, for two seconds at most."""


class NoTelemetry:
    """Keeps traces of others together, records nothing."""

    def span(self, span: FinishedSpan) -> TraceContext:
        return span.identity or (span.parent.child() if span.parent else new_trace())

    def close(self) -> None:
        """Do nothing."""
