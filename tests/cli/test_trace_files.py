"""Where the traces of a run go, and which are found again."""

import os
from pathlib import Path

import pytest

from baton.cli.span_files.places import (
    KEPT,
    begin_trace_file,
    chosen_collector,
    collector_of,
    newest_trace_file,
)
from baton.cli.trace import show_traces
from baton.launch import CommandFailed
from baton.process.telemetry.collector import Collector


def begin(folder: Path, port: int, modified_s: int) -> Path:
    path = begin_trace_file(folder, port)
    os.utime(path, (modified_s, modified_s))
    return path


def test_before_the_first_run_there_is_none(tmp_path: Path) -> None:
    assert newest_trace_file(tmp_path / "never") is None


def test_the_file_written_last_is_found(tmp_path: Path) -> None:
    first, second = begin(tmp_path, 1, modified_s=100), begin(tmp_path, 2, modified_s=200)
    assert newest_trace_file(tmp_path) == second
    os.utime(first, (300, 300))
    assert newest_trace_file(tmp_path) == first


def test_a_run_on_the_same_port_begins_anew(tmp_path: Path) -> None:
    begin_trace_file(tmp_path, 1).write_text("old\n")
    assert begin_trace_file(tmp_path, 1).read_text() == ""


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    runs = [begin(tmp_path, port, modified_s=port) for port in range(1, KEPT + 4)]
    assert sorted(tmp_path.iterdir()) == sorted(runs[-KEPT:])


def test_a_run_that_sends_its_traces_elsewhere_says_so_in_its_file(tmp_path: Path) -> None:
    begin_trace_file(tmp_path, 1).write_text('{"trace_id": "a"}\n')
    assert collector_of(tmp_path / "traces-1.jsonl") is None
    begin_trace_file(tmp_path, 2, Collector("http://collector:4317"))
    path = newest_trace_file(tmp_path)
    assert path is not None and collector_of(path) == "http://collector:4317 (OTLP, grpc)"
    assert collector_of(begin_trace_file(tmp_path, 2)) is None


def test_traces_go_to_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_collector(Path("traces")) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317")
    assert chosen_collector() == Collector("http://collector:4317")
    with pytest.raises(
        CommandFailed, match=r"OTEL_EXPORTER_OTLP_ENDPOINT \(http://collector:4317 \(OTLP, grpc\)\) or to --trace-file"
    ):
        chosen_collector(Path("traces"))


def test_a_protocol_that_is_not_spoken_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert chosen_collector() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(CommandFailed, match=r"OTEL_EXPORTER_OTLP_PROTOCOL.*'grpc'"):
        chosen_collector()


def test_without_a_run_a_configured_collector_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.cli.trace.RUNTIME", tmp_path)
    with pytest.raises(CommandFailed, match="no traces yet"):
        show_traces(None, last=1, as_json=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://me:hunter2@collector:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with pytest.raises(CommandFailed) as refused:
        show_traces(None, last=1, as_json=False)
    text = str(refused.value)
    assert "http://collector:4318/v1/traces (OTLP, http/protobuf)" in text and "hunter2" not in text
    assert "gen_ai.response.id" in text and "`baton trace --file FILE`" in text
