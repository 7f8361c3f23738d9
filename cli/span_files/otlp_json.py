"""Conversion of OTLP JSON spans to the format of Baton's trace files (process/telemetry/otel.py).

A document is an ExportTraceServiceRequest, which a collector's file exporter writes per line. Integers may be strings,
enums numbers or names. Other documents, such as metrics, have no spans.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_KINDS = ("internal", "internal", "server", "client", "producer", "consumer")
"""Kinds by number; unspecified counts as internal."""
_ERROR = (2, "2", "STATUS_CODE_ERROR")


def is_otlp(document: object) -> bool:
    """Return whether a document is OTLP JSON with spans."""
    return isinstance(document, dict) and "resourceSpans" in document


def span_objects(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the spans of a document, converted. Raises: ValueError for a malformed one."""
    try:
        for resource in _list(document, "resourceSpans"):
            service = _attributes(resource.get("resource") or {}).get("service.name")
            for scope in _list(resource, "scopeSpans"):
                for span in _list(scope, "spans"):
                    yield _span_object(span, service)
    except (KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise ValueError(f"invalid OTLP span: {error!r}") from error


def _span_object(span: Mapping[str, Any], service: Any) -> dict[str, Any]:
    status = span.get("status") or {}
    return {
        **_ids(span),
        "parent_span_id": str(span.get("parentSpanId") or "").lower() or None,
        "name": str(span.get("name", "")),
        "kind": _kind(span.get("kind", 0)),
        "service": service,
        "start_ns": int(span["startTimeUnixNano"]),
        "end_ns": int(span["endTimeUnixNano"]),
        "status": "error" if status.get("code", 0) in _ERROR else "ok",
        "status_message": status.get("message"),
        "attributes": _attributes(span),
        "events": [
            {"name": each.get("name", ""), "time_ns": int(each["timeUnixNano"]), "attributes": _attributes(each)}
            for each in _list(span, "events")
        ],
        "links": [_ids(each) for each in _list(span, "links")],
    }


def _ids(place: Mapping[str, Any]) -> dict[str, str]:
    return {"trace_id": str(place["traceId"]).lower(), "span_id": str(place["spanId"]).lower()}


def _kind(given: int | str) -> str:
    """Return the name of a span's kind: `server` for 2, "2" and "SPAN_KIND_SERVER"."""
    text = str(given)
    if not text.isdecimal():
        return text.removeprefix("SPAN_KIND_").lower()
    return _KINDS[int(text)] if int(text) < len(_KINDS) else "internal"


def _attributes(holder: Mapping[str, Any]) -> dict[str, Any]:
    return {str(each["key"]): _value(each.get("value") or {}) for each in _list(holder, "attributes")}


def _value(given: Mapping[str, Any]) -> Any:
    for kind, content in given.items():
        match kind:
            case "intValue":
                return int(content)
            case "doubleValue":
                return float(content)  # also reads "NaN" and "Infinity"
            case "stringValue" | "boolValue":
                return content
            case "bytesValue":
                return base64.b64decode(content).hex()
            case "arrayValue":
                return [_value(each) for each in _list(content, "values")]
            case "kvlistValue":
                return {str(each["key"]): _value(each.get("value") or {}) for each in _list(content, "values")}
    return None


def _list(holder: Mapping[str, Any], name: str) -> Sequence[Any]:
    """Return the list in a field; an empty list if the field is absent or null."""
    return holder.get(name) or ()
