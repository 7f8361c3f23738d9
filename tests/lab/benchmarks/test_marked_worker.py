"""Workers whose hand-over stages are timed start as usual."""

import os
from pathlib import Path

import pytest

from tests.fixtures.preloaded import Forked


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_marked_worker_with_help_reads_the_flags_of_its_role(role: str, tmp_path: Path) -> None:
    log, arguments = tmp_path / "log", [role, str(tmp_path / "file"), "--help"]
    status = Forked("baton.lab.benchmarks.transfer.marked_worker", arguments, log, os.environ).wait(60)
    assert status == 0, log.read_text()
    assert "--log-level" in log.read_text()
