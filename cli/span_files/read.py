"""Spans out of a file, whatever its form: our own lines, OTLP JSON line by line, or one JSON document."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.cli.span_files.otlp_json import is_otlp, span_objects


@dataclass(frozen=True, slots=True)
class Span:
    """One line of the trace file."""

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


def read_spans(lines: Iterable[str]) -> list[Span]:
    """Each span once, though a sender repeats what it holds for lost. The last line may be half written, and is then
    left out, as is everything that is no span.
    """
    spans: dict[tuple[str, str, int], Span] = {}
    for content in read_objects(lines):
        fields = {name: content[name] for name in _FIELDS}
        span = Span(**fields, is_error=content["status"] == "error", events=content.get("events", ()))
        spans.setdefault((span.trace_id, span.span_id, span.start_ns), span)
    return list(spans.values())


def read_objects(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The spans as objects in the form of our own lines (process/telemetry/otel.py)."""
    for document in _documents(lines):
        for each in document if isinstance(document, list) else [document]:
            if is_otlp(each):
                yield from _whole(each)
            elif isinstance(each, dict) and each.keys() >= {*_FIELDS, "status"}:
                yield each


def _documents(lines: Iterable[str]) -> Iterator[Any]:
    """A document on each line; where the first line is none, all lines together may be one."""
    iterator = iter(lines)
    first = next((line for line in iterator if line.strip()), "")
    try:
        yield json.loads(first)
    except json.JSONDecodeError:
        rest = list(iterator)
        try:
            yield json.loads(first + "".join(rest))
        except json.JSONDecodeError:
            iterator = iter(rest)  # the first line may be the end of one that was cut
    for line in iterator:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def _whole(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All spans of a document, or none where it is malformed."""
    try:
        return list(span_objects(document))
    except ValueError:
        return []
