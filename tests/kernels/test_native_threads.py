"""The pool's guests: threads on cores of another process, as long as that does not need them."""

import os
import subprocess
import sys

import pytest

from baton import IMPORT_PATH

pytestmark = pytest.mark.usefixtures("native_kernels")

SCRIPT = """
import os, sys, threading, time
from pathlib import Path
import numpy as np
import torch
torch.set_num_threads(1)
from baton import IMPORT_PATH
from baton.kernels.native.library import native_library
from baton.kernels.linear import packed_linear
from baton.kernels.packed_weight import Stored, pack

def guests():
    found = []
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != os.getpid() and os.sched_getscheduler(int(task.name)) == os.SCHED_IDLE:
            found.append(int(task.name))
    return found

def on_core_ns(thread):
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0])

def multiply(times=40):
    return [packed_linear(x, weight) for _ in range(times)][-1]

cores = sorted(os.sched_getaffinity(0))
own, other = cores[0], cores[-1]
os.sched_setaffinity(0, {own})
x, weight = torch.randn(96, 512), pack(torch.randn(2048, 512), Stored.FLOAT32, None)
alone = multiply()
in_use = np.zeros(1, np.uint8)
os.sched_setaffinity(0, set(cores))
os.sched_setaffinity(0, {own})
native_library().borrow({other}, in_use)
deadline = time.monotonic() + 60
together = multiply()
# A guest that another program keeps from its core is called home for a while: see threads.cpp.
while not any(os.sched_getaffinity(each) == {other} for each in guests()):
    assert time.monotonic() < deadline, [os.sched_getaffinity(each) for each in guests()]
    together = multiply()
(guest,) = guests()
worked = on_core_ns(guest)
in_use[0] = 1
multiply(1)
before = on_core_ns(guest)
kept_out = multiply()
print("computed as guest:", worked > 0)
print("computed while in use:", on_core_ns(guest) - before > 2_000_000)
print("equal:", torch.equal(alone, together) and torch.equal(alone, kept_out))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """In a process of its own: guests are for life."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False, env=_environment()
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ") for line in done.stdout.splitlines())


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(IMPORT_PATH), "OMP_NUM_THREADS": "1"}


def test_guests_compute_on_idle_cores(said: dict[str, str]) -> None:
    assert said["computed as guest"] == "True"


def test_guests_leave_cores_to_their_owner(said: dict[str, str]) -> None:
    assert said["computed while in use"] == "False"


def test_results_do_not_depend_on_guests(said: dict[str, str]) -> None:
    assert said["equal"] == "True"
