"""How a thread that computes prompts lets other threads have its core."""

import os
from pathlib import Path, PurePosixPath

AUTOGROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")  # of kernels that share out the CPU by session
OWN_CONTROL_GROUPS = Path("/proc/self/cgroup")
CONTROL_GROUPS = Path("/sys/fs/cgroup")


def count_as_idle() -> None:
    """The scheduler regards the core of the calling thread as idle. Linux.

    Threads that wake up are then put on this core, and not on one where a decode worker computes. The policy is
    SCHED_IDLE, whose weight is nearly nothing beside other threads of the same group, and a thread without privileges
    cannot leave it again. So it is set only where this process's own session is the group, which keeps its share of the
    CPU beside other sessions. Threads that this one starts from now on inherit the policy.
    """
    if os.getsid(0) == os.getpid() and _are_sessions_groups():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _are_sessions_groups() -> bool:
    """Whether the kernel shares out the CPU by session, and no control group takes the place of the session."""
    try:
        return AUTOGROUPS.read_text().strip() == "1" and not _is_controlled(OWN_CONTROL_GROUPS.read_text())
    except OSError:
        return False


def _is_controlled(own_groups: str) -> bool:
    """`own_groups`: lines of hierarchy, controllers and path; version 2 of control groups names no controllers.

    A path of / may be the root of a container alone. Files show it: only groups below the root have a `cpu.weight`
    (version 2), only the root has a `release_agent` (version 1).
    """
    for line in own_groups.splitlines():
        _, controllers, name = line.split(":", 2)
        is_root = name == "/" and (CONTROL_GROUPS / controllers / "release_agent").exists()
        if "cpu" in controllers.split(",") and not is_root:
            return True
        path = PurePosixPath(name.lstrip("/"))
        if not controllers and any((CONTROL_GROUPS / each / "cpu.weight").exists() for each in (path, *path.parents)):
            return True
    return False
