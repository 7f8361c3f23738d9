"""Spans in a file, with given identities and times; and that nowhere to send to harms nobody."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.process.telemetry.export import open_telemetry
from baton.process.telemetry.otel import OpenTelemetry, SpanFile
from baton.process.telemetry.spans import FinishedSpan, NoTelemetry, SpanEvent, SpanKind, Telemetry, WallClock
from baton.process.telemetry.trace_context import TraceContext, new_trace

ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "traces.jsonl"


@pytest.fixture
def telemetry(file: Path) -> Iterator[Telemetry]:
    telemetry = open_telemetry("router", collector=None, trace_file=file)
    yield telemetry
    telemetry.close()


def _written(telemetry: Telemetry, file: Path) -> list[dict[str, Any]]:
    telemetry.close()
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_finished_span_is_written_with_all_it_has(telemetry: Telemetry, file: Path) -> None:
    parent, link = new_trace(), new_trace()
    span = FinishedSpan(
        "kv.transfer",
        start_ns=1_000,
        end_ns=2_500,
        parent=parent,
        kind=SpanKind.SERVER,
        attributes={"bytes": 7, "chunk_ms": [1.5, 2.5]},
        events=[SpanEvent("stall", 1_200, {"gap_ms": 3.0})],
        links=[link],
        error="stale",
    )
    place = telemetry.span(span)
    assert place.trace_id == parent.trace_id
    (written,) = _written(telemetry, file)
    assert written == {
        "trace_id": parent.trace_id,
        "span_id": place.span_id,
        "parent_span_id": parent.span_id,
        "name": "kv.transfer",
        "kind": "server",
        "service": "router",
        "start_ns": 1_000,
        "end_ns": 2_500,
        "status": "error",
        "status_message": "stale",
        "attributes": {"bytes": 7, "chunk_ms": [1.5, 2.5]},
        "events": [{"name": "stall", "time_ns": 1_200, "attributes": {"gap_ms": 3.0}}],
        "links": [{"trace_id": link.trace_id, "span_id": link.span_id}],
    }


def test_span_keeps_the_identity_that_was_given_away(telemetry: Telemetry, file: Path) -> None:
    identity = new_trace()
    assert telemetry.span(FinishedSpan("root", 1, 2, identity=identity)) == identity
    telemetry.span(FinishedSpan("child", 1, 2, parent=identity))
    root, child = _written(telemetry, file)
    assert (root["trace_id"], root["span_id"], root["parent_span_id"]) == (identity.trace_id, identity.span_id, None)
    assert (child["trace_id"], child["parent_span_id"]) == (identity.trace_id, identity.span_id)


def test_span_without_parent_begins_a_trace(telemetry: Telemetry) -> None:
    first, second = (telemetry.span(FinishedSpan("root", 1, 2)) for _ in range(2))
    assert first.trace_id != second.trace_id


def test_unsampled_trace_is_not_written(telemetry: Telemetry, file: Path) -> None:
    caller = TraceContext("1" * 32, "2" * 16, sampled=False, tracestate="vendor=1")
    place = telemetry.span(FinishedSpan("root", 1, 2, parent=caller))
    assert (place.trace_id, place.sampled, place.tracestate) == (caller.trace_id, False, "vendor=1")
    assert _written(telemetry, file) == []


def test_wall_times_follow_the_monotonic_clock_from_one_anchor() -> None:
    clock = WallClock(wall_ns=1_000_000_000, monotonic_s=50.0)
    assert clock.at(50.0) == 1_000_000_000
    assert clock.at(50.25) - clock.at(50.0) == 250_000_000
    assert clock.at(49.5) == 500_000_000


def test_without_a_target_contexts_still_form_one_trace() -> None:
    telemetry = open_telemetry("router", None, None)
    assert isinstance(telemetry, NoTelemetry)
    identity = new_trace()
    assert telemetry.span(FinishedSpan("root", 1, 2, identity=identity)) == identity
    assert telemetry.span(FinishedSpan("child", 1, 2, parent=identity)).trace_id == identity.trace_id
    telemetry.close()


def test_file_that_cannot_be_written_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    telemetry = open_telemetry("router", None, tmp_path / "missing" / "traces.jsonl")
    for _ in range(3):
        telemetry.span(FinishedSpan("root", 1, 2))
        telemetry._provider.force_flush()  # type: ignore[attr-defined]
    telemetry.close()
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    assert "traces.jsonl" in caplog.text


def test_process_package_imports_without_redis_and_opentelemetry() -> None:
    script = """
import sys
for name in ("redis", "opentelemetry", "uvloop", "baton.protos", "torch"):
    sys.modules[name] = None
import pathlib
modules = [path.with_suffix("").parts for path in pathlib.Path("process").rglob("*.py") if path.stem != "otel"]
assert ("process", "config") in modules
for parts in modules:
    __import__("baton." + ".".join(parts))
from baton.process.telemetry.export import open_telemetry
from baton.process.telemetry.spans import NoTelemetry
assert isinstance(open_telemetry("x", None, pathlib.Path("never")), NoTelemetry)
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "traces are not recorded" in result.stderr


def test_full_span_file_is_rotated(file: Path) -> None:
    writers = [OpenTelemetry("router", SpanFile(file, max_bytes=1), str(file), None) for _ in range(2)]
    for number, writer in enumerate(writers):
        writer.span(FinishedSpan(f"span-{number}", start_ns=1, end_ns=2))
        writer.close()
    older = file.with_name("traces.jsonl.1")
    assert json.loads(older.read_text())["name"] == "span-1" and not file.exists()
