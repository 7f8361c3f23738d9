"""A thread that counts as idle, in a process of its own."""

import os
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from baton.engine.runner import thread_preparation
from tests.fixtures.preloaded import FORKING


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """It shares out the CPU by session, and the process is in a control group that does not control the CPU."""
    (tmp_path / "enabled").write_text("1\n")
    (tmp_path / "own").write_text("0::/user/terminal\n")
    (tmp_path / "groups" / "user" / "terminal").mkdir(parents=True)
    return tmp_path


def policies(kernel: Path, own_session: bool = True) -> list[int]:
    """Of the thread that is to count as idle, and of the main thread."""
    with ProcessPoolExecutor(1, FORKING) as process:
        return process.submit(policies_here, kernel, own_session).result(30)


def policies_here(kernel: Path, own_session: bool) -> list[int]:
    if own_session:
        os.setsid()
    thread_preparation.AUTOGROUPS = kernel / "enabled"
    thread_preparation.OWN_CONTROL_GROUPS, thread_preparation.CONTROL_GROUPS = kernel / "own", kernel / "groups"
    found: list[int] = []

    def compute() -> None:
        thread_preparation.count_as_idle()
        found.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    return [*found, os.sched_getscheduler(0)]


def test_thread_in_its_own_session_counts_as_idle(kernel: Path) -> None:
    assert policies(kernel) == [os.SCHED_IDLE, os.SCHED_OTHER]


def test_thread_keeps_its_policy_in_a_shared_session(kernel: Path) -> None:
    assert policies(kernel, own_session=False) == [os.SCHED_OTHER] * 2


@pytest.mark.parametrize("text", ["0\n", None])
def test_thread_keeps_its_policy_without_groups_by_session(text: str | None, kernel: Path) -> None:
    (kernel / "enabled").unlink() if text is None else (kernel / "enabled").write_text(text)
    assert policies(kernel) == [os.SCHED_OTHER] * 2


@pytest.mark.parametrize("group", ["", "user", "user/terminal"])
def test_thread_keeps_its_policy_where_a_control_group_shares_out_the_cpu(group: str, kernel: Path) -> None:
    """Its own, one above it, or that of its container, which looks like the root there."""
    (kernel / "groups" / group / "cpu.weight").write_text("100\n")
    assert policies(kernel) == [os.SCHED_OTHER] * 2


@pytest.mark.parametrize(
    ("name", "is_root", "policy"),
    [("/", True, os.SCHED_IDLE), ("/", False, os.SCHED_OTHER), ("/docker/1", True, os.SCHED_OTHER)],
)
def test_thread_counts_as_idle_under_control_groups_v1_in_the_root_alone(
    name: str, is_root: bool, policy: int, kernel: Path
) -> None:
    (kernel / "own").write_text(f"4:cpu,cpuacct:{name}\n0::/\n")
    (kernel / "groups" / "cpu,cpuacct").mkdir()
    if is_root:
        (kernel / "groups" / "cpu,cpuacct" / "release_agent").touch()
    assert policies(kernel) == [policy, os.SCHED_OTHER]
