"""Spans as JSON lines in a file, for `baton trace` and machines without a collector.

{"trace_id", "span_id", "parent_span_id"|null, "name", "kind", "service", "start_ns", "end_ns", "status": "ok"|"error",
 "status_message"|null, "attributes": {}, "events": [{"name", "time_ns", "attributes"}],
 "links": [{"trace_id", "span_id"}]}
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.resources import SERVICE_NAME
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, StatusCode, format_span_id, format_trace_id


class SpanFile(SpanExporter):
    """Appends; several processes may share one file, each batch is one write. Opened per batch, so it may be moved."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(json.dumps(_as_object(span), ensure_ascii=False, default=list) + "\n" for span in spans)
        try:
            with self._path.open("ab", buffering=0) as file:
                file.write(lines.encode())
        except OSError:
            return SpanExportResult.FAILURE  # reported by the caller, once
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing is kept open."""


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
