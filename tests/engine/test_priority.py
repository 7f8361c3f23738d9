"""The priority of a thread that computes prompts, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, os, sys, threading
from pathlib import Path
from engine import priority
priority.AUTOGROUPS = Path(sys.argv[1])

policies = []

def compute():
    priority.count_as_idle()
    policies.append(os.sched_getscheduler(0))

thread = threading.Thread(target=compute)
thread.start()
thread.join()
policies.append(os.sched_getscheduler(0))
print(json.dumps(policies))
"""


def policies(autogroups: Path, own_session: bool) -> list[int]:
    """Of the thread that is to count as idle, and of the main thread."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(autogroups)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        start_new_session=own_session,
    )
    found: list[int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("own_session", "grouped", "policy"),
    [
        (True, "1\n", os.SCHED_IDLE),
        (False, "1\n", os.SCHED_OTHER),
        (True, "0\n", os.SCHED_OTHER),
        (True, None, os.SCHED_OTHER),
    ],
)
def test_the_core_counts_as_idle_only_where_the_session_keeps_its_share(
    own_session: bool, grouped: str | None, policy: int, tmp_path: Path
) -> None:
    autogroups = tmp_path / "enabled"
    if grouped is not None:
        autogroups.write_text(grouped)
    assert policies(autogroups, own_session) == [policy, os.SCHED_OTHER]
