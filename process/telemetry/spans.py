"""Spans, handed over when they are finished: stages are measured as durations and drawn once a request has ended.

Without OpenTelemetry, or with nowhere to send to, all of it is a no-op. Nothing here blocks or fails a request.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from baton.process.telemetry.collector import Collector
from baton.process.telemetry.trace_context import TraceContext, new_trace

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
Attributes = Mapping[str, AttributeValue]

logger = logging.getLogger(__name__)


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


def open_telemetry(service_name: str, collector: Collector | None, trace_file: Path | None) -> Telemetry:
    """Open telemetry to the collector if there is one, else to a file if one is named, else to nowhere."""
    if collector is None and trace_file is None:
        return NoTelemetry()
    try:
        from baton.process.telemetry.otel import file_telemetry, otlp_telemetry

        if collector is not None:
            return otlp_telemetry(service_name, collector)
    except ImportError as error:
        logger.warning("no traces: %s", error)
        return NoTelemetry()
    return file_telemetry(service_name, trace_file) if trace_file is not None else NoTelemetry()
