"""How a thread that computes prompts lets other threads have its core."""

import os
from pathlib import Path

AUTOGROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")  # of kernels that share out the CPU by session


def count_as_idle() -> None:
    """The scheduler regards the core of the calling thread as idle. Linux.

    Threads that wake up are then put on this core, and not on one where a decode worker computes. The policy is
    SCHED_IDLE, whose weight is nearly nothing beside other threads of the session. So it is set only in a session of
    this process's own, which keeps its share of the CPU beside other sessions. Threads that this one starts from now on
    inherit it.
    """
    if os.getsid(0) == os.getpid() and _are_sessions_groups():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _are_sessions_groups() -> bool:
    try:
        return AUTOGROUPS.read_text().strip() == "1"
    except OSError:
        return False
