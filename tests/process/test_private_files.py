"""Files of a run are closed to other users from the moment they exist, whatever the umask and the file before."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cli.span_files.places import begin_trace_file
from baton.launch.log_files import LogFile, begin_logs
from baton.launch.run_record import RunRecord, kept_secret, write_run_record
from baton.process.private_files import append_private, older, private_folder, write_private
from baton.process.telemetry.export import open_telemetry
from baton.process.telemetry.spans import FinishedSpan


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_private_file_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "log"
    append_private(file, b"one\n")
    append_private(file, b"two\n")
    assert (mode(file), file.read_text()) == (0o600, "one\ntwo\n")


def test_full_private_file_is_rotated(tmp_path: Path) -> None:
    file = tmp_path / "log"
    for content in (b"one\n", b"two\n", b"three\n"):
        append_private(file, content, max_bytes=8)
    assert (older(file).read_text(), file.read_text()) == ("one\ntwo\n", "three\n")


def test_write_private_replaces_a_file_that_others_could_read(tmp_path: Path) -> None:
    file = tmp_path / "record"
    file.write_text("before")
    file.chmod(0o644)
    write_private(file, "after")
    assert (mode(file), file.read_text()) == (0o600, "after")
    assert list(tmp_path.iterdir()) == [file]


def test_private_folder_closes_a_folder_that_was_open(tmp_path: Path) -> None:
    assert mode(private_folder(tmp_path / "new" / "deep")) == 0o700
    (tmp_path / "old").mkdir(0o755)
    assert mode(private_folder(tmp_path / "old")) == 0o700


def test_run_leaves_no_file_that_others_can_read(tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    logs = begin_logs(runtime, 1)
    LogFile(logs / "router.log", pytest.fail).write("line")
    write_run_record(runtime, 1, RunRecord(1, (), (), str(logs), "", {}, {}))
    begin_trace_file(runtime, 1)
    assert kept_secret(runtime, 1) == kept_secret(runtime, 1) != kept_secret(runtime, 2)
    traces = tmp_path / "chosen.jsonl"
    telemetry = open_telemetry("router", collector=None, trace_file=traces)
    telemetry.span(FinishedSpan("request", 0, 1))
    telemetry.close()
    found = {path.name: mode(path) for path in (*runtime.rglob("*"), traces, runtime)}
    folders = {"runtime": 0o700, "logs-1": 0o700}
    files = dict.fromkeys(["router.log", "run-1.json", "traces-1.jsonl", "chosen.jsonl", "secret-1", "secret-2"], 0o600)
    assert found == folders | files
