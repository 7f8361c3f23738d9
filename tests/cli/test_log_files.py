"""What a run keeps beside the terminal: its log files, and the record of what it consists of."""

import os
from pathlib import Path

from baton.launch.log_files import KEPT_RUNS, LogFile, TeeWriter, begin_logs
from baton.launch.run_record import RunRecord, newest_run, write_run_record
from baton.process.private_files import older

RECORD = RunRecord(7, ("h:1",), ("h:2", "h:3"), "/logs", "/traces", {"router": {"--port": "1"}}, {"A": "b"})


def test_full_log_file_is_rotated(tmp_path: Path) -> None:
    reports: list[str] = []
    path = tmp_path / "router.log"
    log = LogFile(path, reports.append, max_bytes=20)
    for number in range(5):
        log.write(f"line {number}.....")
    assert path.read_text() == "line 4.....\n"
    assert older(path).read_text() == "line 2.....\nline 3.....\n"
    assert reports == []


def test_log_file_unwritable_is_reported_once(tmp_path: Path) -> None:
    reports: list[str] = []
    kept: list[str] = []

    class Kept:
        def write(self, line: str) -> None:
            kept.append(line)

    both = TeeWriter(LogFile(tmp_path / "none" / "x.log", reports.append), Kept())
    for _ in range(3):
        both.write("line")
    assert kept == ["line"] * 3
    assert len(reports) == 1 and "x.log" in reports[0]


def test_begin_logs_keeps_port_and_removes_old_runs(tmp_path: Path) -> None:
    (begin_logs(tmp_path, 1) / "router.log").write_text("before\n")
    assert (begin_logs(tmp_path, 1) / "router.log").read_text() == "before\n"
    for port in range(2, KEPT_RUNS + 3):
        os.utime(begin_logs(tmp_path, port), (port, port))
    newest = begin_logs(tmp_path, 99)
    assert newest.is_dir() and len(list(tmp_path.iterdir())) == KEPT_RUNS


def test_newest_run_skips_unreadable_records(tmp_path: Path) -> None:
    assert newest_run(tmp_path) is None
    first = write_run_record(tmp_path, 1, RECORD)
    assert newest_run(tmp_path) == RECORD
    os.utime(first, (1, 1))
    (tmp_path / "run-2.json").write_text('{"pid": 1')
    assert newest_run(tmp_path) == RECORD
