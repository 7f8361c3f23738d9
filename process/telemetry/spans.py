"""Finished trace spans: stages are measured while a request runs and converted to spans after it.

Without OpenTelemetry or a destination nothing is recorded. Never blocks or fails a request.
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
    """Stage of a request. Times are wall-clock nanoseconds of one WallClock.

    `identity`: ids of a span whose traceparent was sent to other processes before the span ended; None: the span gets
    new ids. A span without `identity` and `parent` begins a trace.
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
    error: str | None = None  # message of the error; None: success


@dataclass(frozen=True, slots=True)
class WallClock:
    """Wall-clock times of one request: read once at its start, then advanced by the monotonic clock."""

    wall_ns: int
    monotonic_s: float

    @staticmethod
    def now() -> "WallClock":
        return WallClock(time.time_ns(), time.monotonic())  # noqa: TID251 -- anchor of a trace

    def at(self, monotonic_s: float) -> int:
        """Convert a reading of time.monotonic() to nanoseconds since 1970."""
        return self.wall_ns + round((monotonic_s - self.monotonic_s) * 1e9)


class Telemetry(Protocol):
    """Destination of spans. Called from one thread."""

    def span(self, span: FinishedSpan) -> TraceContext:
        """Record a finished span; return its ids, which child spans need."""

    def close(self) -> None:
        """Send the remaining spans, for 2 s at most."""


class NoTelemetry:
    """Telemetry that records nothing, but passes trace contexts on."""

    def span(self, span: FinishedSpan) -> TraceContext:
        return span.identity or (span.parent.child() if span.parent else new_trace())

    def close(self) -> None:
        """Do nothing."""
