"""Reading core lists and pinning, the latter in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.process.affinity import AUTOGROUP, CoresUnavailable, current_cores, lower_priority, parse_cores, pin_process


def test_cores_are_parsed_like_tasksets() -> None:
    assert parse_cores("0,2-4, 7") == {0, 2, 3, 4, 7}


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2"])
def test_malformed_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_cores(text)


def test_pinning_covers_threads_that_were_started_before() -> None:
    core = min(current_cores())
    script = f"""
import os, threading
from baton.process.affinity import pin_process
stop, started = threading.Event(), threading.Event()
thread = threading.Thread(target=lambda: (started.set(), stop.wait()))
thread.start(); started.wait()
pin_process(frozenset([{core}]))
print(os.sched_getaffinity(0) == os.sched_getaffinity(thread.native_id) == {{{core}}})
stop.set()
"""
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=30, check=True
    )
    assert result.stdout == "True\n"


def test_foreign_core_is_rejected() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(CoresUnavailable, match="4095"):
        pin_process(frozenset([4095]))
    assert os.sched_getaffinity(0) == before


STAND_BACK = """
from baton.process.affinity import AUTOGROUP, lower_priority
lower_priority(7)
print(AUTOGROUP.read_text() if AUTOGROUP.exists() else "no groups")
"""


def test_own_session_is_niced() -> None:
    """Where the kernel does not group by session, nothing happens."""
    done = subprocess.run(
        [sys.executable, "-c", STAND_BACK],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        start_new_session=True,
    )
    assert done.stdout.endswith("nice 7\n\n" if AUTOGROUP.exists() else "no groups\n")


def test_shared_session_is_left_alone() -> None:
    code = "import os; from baton.process.affinity import lower_priority\n"
    code += "assert os.getsid(0) != os.getpid(); lower_priority(7)"
    before = AUTOGROUP.read_text() if AUTOGROUP.exists() else ""
    subprocess.run([sys.executable, "-c", code], timeout=30, check=True)
    assert (AUTOGROUP.read_text() if AUTOGROUP.exists() else "") == before


@pytest.mark.parametrize("is_own", [True, False])
def test_niceness_is_written_only_to_an_own_session(
    is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "autogroup"
    group.touch()
    monkeypatch.setattr("baton.process.affinity.AUTOGROUP", group)
    monkeypatch.setattr("baton.process.affinity.os.getsid", lambda pid: os.getpid() if is_own else os.getpid() + 1)
    lower_priority(7)
    assert group.read_text() == ("7" if is_own else "")


def test_without_groups_of_sessions_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.process.affinity.AUTOGROUP", tmp_path / "none" / "autogroup")
    monkeypatch.setattr("baton.process.affinity.os.getsid", lambda pid: os.getpid())
    lower_priority(7)
    assert list(tmp_path.iterdir()) == []
