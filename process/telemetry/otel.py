"""Export of traces by the OpenTelemetry SDK. Sampling, limits and resource follow the standard OTEL_* variables.

The batch processor has a thread and a bounded queue; spans that do not fit or cannot be sent are dropped. Without a
collector, spans are written to a file as JSON lines, for `baton why --file`:

{"trace_id", "span_id", "parent_span_id"|null, "name", "kind", "service", "start_ns", "end_ns", "status": "ok"|"error",
 "status_message"|null, "attributes": {}, "events": [{"name", "time_ns", "attributes"}],
 "links": [{"trace_id", "span_id"}]}
"""

import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.trace import SpanContext, StatusCode, format_span_id, format_trace_id
from opentelemetry.trace.span import TraceState

from baton.process.private_files import append_private
from baton.process.telemetry.collector import Collector
from baton.process.telemetry.spans import FinishedSpan, SpanKind
from baton.process.telemetry.trace_context import TraceContext
from baton.versions import RELEASE

_CLOSE_S = 2.0
_EXPORT_TIMEOUT_S = 2.0
_FILE_DELAY_MS = 200.0
_FILE_MAX_BYTES = 64 << 20
_KINDS = {
    SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
    SpanKind.SERVER: trace.SpanKind.SERVER,
    SpanKind.CLIENT: trace.SpanKind.CLIENT,
}

logger = logging.getLogger(__name__)


def otlp_telemetry(service_name: str, collector: Collector) -> "OpenTelemetry":
    """Return the exporter to a collector. It reads headers, certificates and compression from OTEL_EXPORTER_OTLP_*.

    Raises: ImportError if the exporter of that protocol is not installed.
    """
    # The exporter logs every failed attempt; QuietExporter logs only changes.
    logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
    exporter: SpanExporter
    # Imported here, because writing a file needs only the SDK.
    if collector.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

        exporter = over_grpc.OTLPSpanExporter(endpoint=collector.endpoint, timeout=_EXPORT_TIMEOUT_S)
    else:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

        exporter = over_http.OTLPSpanExporter(endpoint=collector.endpoint, timeout=_EXPORT_TIMEOUT_S)
    return OpenTelemetry(service_name, exporter, str(collector), None)


def file_telemetry(service_name: str, path: Path) -> "OpenTelemetry":
    return OpenTelemetry(service_name, SpanFile(path), str(path), _FILE_DELAY_MS)


class OpenTelemetry:
    """A `process.telemetry.spans.Telemetry` over the OpenTelemetry SDK."""

    def __init__(self, service_name: str, exporter: SpanExporter, target: str, delay_ms: float | None) -> None:
        self._exporter = exporter
        self._ids = _ChosenIds()
        self._provider = TracerProvider(
            resource=_resource(service_name), id_generator=self._ids, shutdown_on_exit=False
        )
        processor = BatchSpanProcessor(QuietExporter(exporter, target), schedule_delay_millis=delay_ms)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("baton")

    def span(self, span: FinishedSpan) -> TraceContext:
        self._ids.chosen = span.identity
        started = self._tracer.start_span(
            span.name,
            # an empty context, since with None the calling task's current span is the parent
            context=_parent_context(span.parent),
            kind=_KINDS[span.kind],
            attributes=dict(span.attributes),
            links=[trace.Link(_span_context(link)) for link in span.links],
            start_time=span.start_ns,
        )
        self._ids.chosen = None
        for event in span.events:
            started.add_event(event.name, dict(event.attributes), timestamp=event.time_ns)
        if span.error is not None:
            started.set_status(trace.Status(StatusCode.ERROR, span.error))
        started.end(end_time=span.end_ns)
        return _trace_context(started.get_span_context())

    def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, name="close-telemetry", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
        if closing.is_alive():
            self._exporter.shutdown()  # stops the exporter's retries


class QuietExporter(SpanExporter):
    """Exporter that logs the first of consecutive failures and the first success after them."""

    def __init__(self, exporter: SpanExporter, target: str) -> None:
        self._exporter = exporter
        self._target = target
        self._failed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._failed:
            logger.warning("traces cannot be sent to %s; dropping them until they can", self._target)
        if self._failed and not failed:
            logger.info("traces can be sent to %s again", self._target)
        self._failed = failed
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _ChosenIds(IdGenerator):
    """Generator of span ids: random, except if a span's ids were sent to other processes before the span ended."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self.chosen: TraceContext | None = None

    def generate_span_id(self) -> int:
        return int(self.chosen.span_id, 16) if self.chosen else self._random.generate_span_id()

    def generate_trace_id(self) -> int:
        return int(self.chosen.trace_id, 16) if self.chosen else self._random.generate_trace_id()


def _resource(service_name: str) -> Resource:
    resource = Resource.create({SERVICE_VERSION: RELEASE})
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):  # OTEL_SERVICE_NAME is not set
        return resource.merge(Resource({SERVICE_NAME: service_name}))
    return resource


def _parent_context(parent: TraceContext | None) -> Context:
    if parent is None:
        return Context()
    return trace.set_span_in_context(trace.NonRecordingSpan(_span_context(parent)), Context())


def _span_context(place: TraceContext) -> SpanContext:
    return SpanContext(
        int(place.trace_id, 16),
        int(place.span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED if place.sampled else trace.TraceFlags.DEFAULT),
        trace_state=TraceState.from_header([place.tracestate]),
    )


def _trace_context(context: SpanContext) -> TraceContext:
    return TraceContext(
        format_trace_id(context.trace_id),
        format_span_id(context.span_id),
        context.trace_flags.sampled,
        context.trace_state.to_header(),
    )


class SpanFile(SpanExporter):
    """Exporter that appends spans to a file. Several processes may share the file, since each batch is one write. The
    file may be moved while it is in use.

    At `max_bytes` the file is renamed to `PATH.1`, replacing the previous one.
    """

    def __init__(self, path: Path, max_bytes: int = _FILE_MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(json.dumps(_as_object(span), ensure_ascii=False, default=list) + "\n" for span in spans)
        try:
            append_private(self._path, lines.encode(), self._max_bytes)
        except OSError:
            return SpanExportResult.FAILURE  # QuietExporter logs it once
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Do nothing: no file is kept open."""


def _as_object(span: ReadableSpan) -> dict[str, Any]:
    own: Any = span.get_span_context()
    failed = span.status.status_code is StatusCode.ERROR
    return {
        **_ids(own),
        "parent_span_id": format_span_id(span.parent.span_id) if span.parent else None,
        "name": span.name,
        "kind": span.kind.name.lower(),
        "service": span.resource.attributes.get(SERVICE_NAME),
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "status": "error" if failed else "ok",
        "status_message": span.status.description,
        "attributes": dict(span.attributes or {}),
        "events": [
            {"name": event.name, "time_ns": event.timestamp, "attributes": dict(event.attributes or {})}
            for event in span.events
        ],
        "links": [_ids(link.context) for link in span.links],
    }


def _ids(context: SpanContext) -> dict[str, str]:
    return {"trace_id": format_trace_id(context.trace_id), "span_id": format_span_id(context.span_id)}
