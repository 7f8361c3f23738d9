"""Where the traces of a run go, and which are found again."""

import os
from pathlib import Path

from cli.trace_files import KEPT, begin_trace_file, newest_trace_file


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
