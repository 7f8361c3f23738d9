"""Spans of a file: lines of `baton up`, lines of OTLP JSON, or one JSON document."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.cli.span_files.otlp_json import is_otlp, span_objects


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """One span of a trace file."""

    trace_id: str
    span_id: str
    parent_span_id: str | None
    name: str
    kind: str
    start_ns: int
    end_ns: int
    is_error: bool
    attributes: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]] = ()

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


_FIELDS = ("trace_id", "span_id", "parent_span_id", "name", "kind", "start_ns", "end_ns", "attributes")


def read_spans(lines: Iterable[str]) -> list[StoredSpan]:
    """Return each span once, even if it was sent twice. Skip all else, such as an incomplete last line."""
    spans: dict[tuple[str, str, int], StoredSpan] = {}
    for content in read_objects(lines):
        fields = {name: content[name] for name in _FIELDS}
        span = StoredSpan(**fields, is_error=content["status"] == "error", events=content.get("events", ()))
        spans.setdefault((span.trace_id, span.span_id, span.start_ns), span)
    return list(spans.values())


def read_objects(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield spans as objects in the format of a trace file (process/telemetry/otel.py)."""
    for document in _documents(lines):
        for each in document if isinstance(document, list) else [document]:
            if is_otlp(each):
                yield from _spans_of(each)
            elif isinstance(each, dict) and each.keys() >= {*_FIELDS, "status"}:
                yield each


def _documents(lines: Iterable[str]) -> Iterator[Any]:
    """Yield a JSON document per line, or the one document that all lines form together."""
    iterator = iter(lines)
    first = next((line for line in iterator if line.strip()), "")
    try:
        yield json.loads(first)
    except json.JSONDecodeError:
        rest = list(iterator)
        try:
            yield json.loads(first + "".join(rest))
        except json.JSONDecodeError:
            iterator = iter(rest)  # skip only the first line: it may be truncated
    for line in iterator:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def _spans_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all spans of an OTLP document, or no span if one of them is malformed."""
    try:
        return list(span_objects(document))
    except ValueError:
        return []
