"""Reading core lists and pinning, the latter in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.affinity import current_cores, parse_cores, pin_process


def test_cores_are_read_as_taskset_writes_them() -> None:
    assert parse_cores("0,2-4, 7") == {0, 2, 3, 4, 7}


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2"])
def test_a_malformed_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_cores(text)


def test_pinning_covers_threads_that_were_started_before() -> None:
    core = min(current_cores())
    script = f"""
import os, threading
from service.affinity import pin_process
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


def test_a_core_that_is_not_ours_is_refused() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ValueError, match="4095"):
        pin_process(frozenset([4095]))
    assert os.sched_getaffinity(0) == before


STAND_BACK = "from service.affinity import stand_back; stand_back(7); print(open('/proc/self/autogroup').read())"


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel does not group by session")
def test_a_session_of_its_own_stands_back_behind_others() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STAND_BACK],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        start_new_session=True,
    )
    assert done.stdout.endswith("nice 7\n\n")


def test_a_session_that_others_share_is_left_as_it_is() -> None:
    code = "import os; from service.affinity import stand_back; assert os.getsid(0) != os.getpid(); stand_back(7)"
    before = Path("/proc/self/autogroup").read_text() if Path("/proc/self/autogroup").exists() else ""
    subprocess.run([sys.executable, "-c", code], timeout=30, check=True)
    assert not before or Path("/proc/self/autogroup").read_text() == before
