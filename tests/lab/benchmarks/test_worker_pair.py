"""Start and end of the workers of a benchmark."""

import signal
from pathlib import Path

import pytest

from baton.lab.benchmarks.transfer.worker_pair import worker_process


def test_worker_that_does_not_stop_is_killed_and_costs_no_figure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    begun = tmp_path / "begun"
    deaf = ("sh", "-c", 'trap "" TERM; touch "$0"; exec sleep 600', str(begun))
    with worker_process("decode", tmp_path, within=deaf, stop_s=0.2) as worker:
        while not begun.exists():
            assert worker.process.poll() is None
    assert worker.process.returncode == -signal.SIGKILL
    assert "the decode worker did not stop in 0.2 s" in capfd.readouterr().err


def test_worker_has_its_own_environment(tmp_path: Path) -> None:
    said = tmp_path / "said"
    command = ("sh", "-c", 'echo "$SHARE of $OMP_NUM_THREADS" > "$0"', str(said))
    with worker_process("prefill", tmp_path, within=command, environment={"SHARE": "75"}, threads=3) as worker:
        assert worker.process.wait(30) == 0
    assert said.read_text() == "75 of 3\n"
