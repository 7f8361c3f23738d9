"""A worker with several ranks that is stopped while it starts exits soon, and leaves no process or file."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.process.registry.redis_server import start_redis_server
from tests.e2e.conftest import REPOSITORY
from tests.fixtures.held_worker import STEPS

BOUND_S = 180.0
SHARED_MEMORY = Path("/dev/shm")


def stacks_of(processes: list[int], log: Path) -> str:
    """Return the commands of running processes, and the log after they have written their stacks."""
    commands = [(Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in processes]
    for pid in processes:
        os.kill(pid, signal.SIGQUIT)
    time.sleep(1.0)  # nothing says that a process without a parent has written its stacks
    return "\n".join([*commands, log.read_text()])


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def processes_with(mark: str) -> list[int]:
    """Return the running processes that have `mark` in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


FIRST_STEP_WITH_RANKS = "rank"  # before it, a killed worker has nothing that it could leave
STEPS_WITH_RANKS = list(STEPS)[list(STEPS).index(FIRST_STEP_WITH_RANKS) :]


@pytest.mark.parametrize(
    ("step", "number"),
    [*((step, signal.SIGTERM) for step in STEPS), *((step, signal.SIGKILL) for step in STEPS_WITH_RANKS)],
)
def test_worker_stopped_at_any_step_of_its_start_leaves_nothing(
    step: str, number: signal.Signals, tiny_llama: Path, tmp_path: Path
) -> None:
    redis = start_redis_server()
    shared = set(SHARED_MEMORY.iterdir())
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    mark = f"MARK_OF_TEST={tmp_path}"
    command = [sys.executable, "-m", "tests.fixtures.held_worker", step, "--worker-id", "w", "--model", str(tiny_llama)]
    command += ["--kv-memory", "8MiB", "--tensor-parallel", "2", "--redis-url", redis.url]
    log = tmp_path / "log"
    try:
        with log.open("wb") as output:
            worker = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                cwd=REPOSITORY,
                env={**os.environ, "MARK_OF_TEST": str(tmp_path), "TMPDIR": str(scratch)},
                start_new_session=True,
            )
        wait_for(lambda: f"held at {step}" in log.read_text() or worker.poll() is not None, f"not held at {step}")
        assert worker.poll() is None, log.read_text()
        worker.send_signal(number)
        wait_for(lambda: worker.poll() is not None, "the worker did not end")
        try:
            wait_for(lambda: processes_with(mark) == [], "a process did not end")
        except AssertionError as error:
            raise AssertionError(stacks_of(processes_with(mark), log)) from error
        assert list(scratch.iterdir()) == []
        assert set(SHARED_MEMORY.iterdir()) <= shared or os.environ.get("PYTEST_XDIST_WORKER")
        assert "Traceback" not in log.read_text() and "Error" not in log.read_text(), log.read_text()
    finally:
        for pid in processes_with(mark):
            os.kill(pid, signal.SIGKILL)
        redis.stop()
