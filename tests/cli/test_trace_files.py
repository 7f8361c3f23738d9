"""Where the traces of a run go, and which are found again."""

import os
from pathlib import Path

import pytest

from baton.cli.span_files.places import KEPT, begin_trace_file, chosen_collector, collector_of
from baton.cli.why.recent import requests_in_file
from baton.launch import CommandFailed
from baton.process.config import ConfigError
from baton.process.telemetry.collector import Collector


def begin(folder: Path, port: int, modified_s: int) -> Path:
    path = begin_trace_file(folder, port)
    os.utime(path, (modified_s, modified_s))
    return path


def test_trace_file_of_port_is_replaced(tmp_path: Path) -> None:
    begin_trace_file(tmp_path, 1).write_text("old\n")
    assert begin_trace_file(tmp_path, 1).read_text() == ""


def test_trace_files_keep_the_newest(tmp_path: Path) -> None:
    runs = [begin(tmp_path, port, modified_s=port) for port in range(1, KEPT + 4)]
    assert sorted(tmp_path.iterdir()) == sorted(runs[-KEPT:])


def test_trace_file_names_collector(tmp_path: Path) -> None:
    begin_trace_file(tmp_path, 1).write_text('{"trace_id": "a"}\n')
    assert collector_of(tmp_path / "traces-1.jsonl") is None
    path = begin_trace_file(tmp_path, 2, Collector("http://collector:4317"))
    assert collector_of(path) == "http://collector:4317 (OTLP, grpc)"
    with pytest.raises(CommandFailed, match="went to the collector at http://collector:4317"):
        requests_in_file(path)
    assert collector_of(begin_trace_file(tmp_path, 2)) is None


def test_chosen_collector_excludes_trace_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_collector(Path("traces")) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317")
    assert chosen_collector() == Collector("http://collector:4317")
    with pytest.raises(
        CommandFailed,
        match=r"--trace-file: traces go to OTEL_EXPORTER_OTLP_ENDPOINT \(http://collector:4317 \(OTLP, grpc\)\)",
    ):
        chosen_collector(Path("traces"))


def test_chosen_collector_unknown_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert chosen_collector() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_PROTOCOL.*'grpc'"):
        chosen_collector()
