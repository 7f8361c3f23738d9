"""`baton why --file` reads what an OpenTelemetry collector has written."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from baton.cli.span_files.read import read_objects, read_spans
from baton.cli.why.show import show_file
from baton.launch import CommandFailed
from baton.process.telemetry.otel import OpenTelemetry, SpanFile
from baton.process.telemetry.spans import FinishedSpan, SpanEvent, SpanKind
from baton.process.telemetry.trace_context import new_trace

STAGES = {"baton.total_ms": 8.0, "baton.ttft_ms": 4.5, "baton.prefill_ms": 4.0, "baton.return_ms": 0.5}


class Kept(SpanExporter):
    """Keeps spans twice: as the trace file has them, and as protobuf of OTLP has them in JSON."""

    def __init__(self, path: Path) -> None:
        self._file = SpanFile(path)
        self.documents: list[dict[str, Any]] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.documents.append(_hex_ids(MessageToDict(encode_spans(spans))))
        return self._file.export(spans)


def _hex_ids(value: Any) -> Any:
    """Protobuf writes bytes as base64; OTLP wants ids in hex, and enums as numbers."""
    if isinstance(value, list):
        return [_hex_ids(each) for each in value]
    if not isinstance(value, dict):
        return value
    ids = {"traceId", "spanId", "parentSpanId"}
    changed = {name: base64.b64decode(each).hex() if name in ids else _hex_ids(each) for name, each in value.items()}
    if "kind" in changed:
        changed["kind"] = {"SPAN_KIND_INTERNAL": 1, "SPAN_KIND_SERVER": 2, "SPAN_KIND_CLIENT": 3}[changed["kind"]]
    if changed.get("code") == "STATUS_CODE_ERROR":
        changed["code"] = 2
    return changed


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    """A request with all that a span can have, and one that failed."""
    kept = Kept(tmp_path / "own.jsonl")
    telemetry = OpenTelemetry("router", kept, "here", None)
    attributes = STAGES | {
        "gen_ai.response.id": "r-1",
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "on": True,
    }
    root = telemetry.span(FinishedSpan("chat tiny", 1_000, 9_000_000, kind=SpanKind.SERVER, attributes=attributes))
    event = SpanEvent("stall", 6_000_000, {"baton.gap_ms": 12.5, "n": 2**40})
    telemetry.span(FinishedSpan("decode", 5_000_000, 8_000_000, parent=root, events=[event], links=[new_trace()]))
    telemetry.span(FinishedSpan("chat bad", 2_000, 3_000, kind=SpanKind.SERVER, attributes=STAGES, error="INTERNAL"))
    telemetry.close()
    return kept


def forms(documents: list[dict[str, Any]]) -> dict[str, str]:
    return {
        "lines": "".join(json.dumps(each) + "\n" for each in documents),
        "one document": json.dumps(documents[0], indent=2),
        "a list": json.dumps(documents),
    }


@pytest.mark.parametrize("form", ["lines", "one document", "a list"])
def test_read_objects_of_otlp_json_equals_own_format(kept: Kept, tmp_path: Path, form: str) -> None:
    own = (tmp_path / "own.jsonl").read_text().splitlines(keepends=True)
    (document,) = kept.documents
    written = forms([document])[form]
    assert isinstance(document["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["startTimeUnixNano"], str)
    assert list(read_objects(written.splitlines(keepends=True))) == list(read_objects(own))
    assert len(read_spans(own)) == 3


def test_why_file_of_collector_is_shown_like_own_file(
    kept: Kept, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "collector.json"
    other.write_text(forms(kept.documents)["lines"])
    assert show_file(None, tmp_path / "own.jsonl", 9, False) == 0
    own = capsys.readouterr().out
    assert show_file(None, other, 9, False) == 0
    assert capsys.readouterr().out == own
    assert "4.5 ms" in own and "8.0 ms" in own


def test_otlp_json_accepts_enum_names_and_upper_case_ids() -> None:
    span = {"traceId": "AB", "spanId": "C0", "kind": "SPAN_KIND_SERVER", "name": "chat", "status": {"code": 2}}
    span |= {"startTimeUnixNano": 5, "endTimeUnixNano": "9", "attributes": [{"key": "n", "value": {"intValue": 3}}]}
    (found,) = read_spans([json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})])
    assert (found.trace_id, found.span_id, found.kind, found.is_error) == ("ab", "c0", "server", True)
    assert (found.parent_span_id, found.start_ns, found.end_ns, found.attributes) == (None, 5, 9, {"n": 3})


def test_read_spans_skips_other_broken_and_truncated_lines(kept: Kept) -> None:
    whole = json.dumps(kept.documents[0]) + "\n"
    broken = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "1"}]}]}]}) + "\n"
    lines = [whole[-50:], '{"resourceMetrics": []}\n', broken, whole, whole, whole[:60]]
    assert len(read_spans(lines)) == 3  # once, though they were sent twice


@pytest.mark.parametrize(
    ("content", "message"),
    [("hello\n", "neither those of `baton up` nor OTLP JSON"), ("", "has no completed request")],
)
def test_why_file_without_spans_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "file"
    file.write_text(content)
    with pytest.raises(CommandFailed, match=message):
        show_file(None, file, 1, False)


def test_why_file_without_roots_counts_spans(kept: Kept, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text(forms(kept.documents)["lines"].replace("baton.total_ms", "other"))
    with pytest.raises(CommandFailed, match="has 3 spans, and none is the root"):
        show_file(None, file, 1, False)
