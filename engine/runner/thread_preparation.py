"""Preparation of an engine's thread: cores, priority, CUDA stream, and warm-up of the model."""

import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import torch

from baton.engine.parallel.other_ranks import cores_of, threads_of
from baton.engine.parallel.shard import Shard
from baton.engine.runner.core_use import SpareCores
from baton.engine.runner.runner import Runner
from baton.kernels.native.library import native_library

AUTOGROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")  # 1 if every session is a scheduling group
OWN_CONTROL_GROUPS = Path("/proc/self/cgroup")
CONTROL_GROUPS = Path("/sys/fs/cgroup")


def count_as_idle() -> None:
    """Let the scheduler treat the calling thread's core as idle (Linux).

    The scheduler then places waking threads on this core rather than on a core where a decode worker computes.
    SCHED_IDLE gives a thread almost no weight within its scheduling group, and an unprivileged thread cannot leave
    that policy. So SCHED_IDLE is set only if this process's session is a scheduling group: the group keeps its weight.
    Threads that are started later inherit the policy.
    """
    if os.getsid(0) == os.getpid() and _are_sessions_groups():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _are_sessions_groups() -> bool:
    """Return whether the scheduling groups of the kernel are sessions, not control groups."""
    try:
        return AUTOGROUPS.read_text().strip() == "1" and not _is_controlled(OWN_CONTROL_GROUPS.read_text())
    except OSError:
        return False


def _is_controlled(own_groups: str) -> bool:
    """Return whether a control group limits the process. `own_groups`: lines `hierarchy:controllers:path`.

    The path `/` may be the root of a container instead of the machine's root. In version 1, only the machine's root
    has the file `release_agent`. In version 2, only groups below the machine's root have the file `cpu.weight`, and
    the lines name no controllers.
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


def thread_preparation(
    cores: frozenset[int] | None,
    device: torch.device,
    runner: Runner,
    nice: int = 0,
    priority: int = 0,
    warm: bool = False,
    spare: SpareCores | None = None,
    then: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    """Return the function that pins the engine's thread to cores, sets its thread count and warms up the model.

    `cores`: cores of all ranks; the thread uses the first rank's. `nice`: niceness of the thread and of those that it
    starts. `priority`: priority of its CUDA stream; lower numbers run first. `warm`: skip the warm-up, since
    the model is already warm and blocks may be in use. `spare`: see SpareCores.
    `then`: last function to call before the first step.
    """
    first = Shard(0, 1 if runner.other_ranks is None else runner.other_ranks.degree)
    dealt = None if cores is None else tuple(sorted(cores))
    own = cores_of(first, dealt)

    def prepare() -> None:
        if own is not None or (first.degree > 1 and device.type == "cpu"):
            torch.set_num_threads(threads_of(first, dealt))
        if own is not None:
            os.sched_setaffinity(0, own)
        if spare is not None and (native := native_library()) is not None:
            native.borrow(spare.cores, spare.in_use)
        if nice:
            os.setpriority(os.PRIO_PROCESS, 0, nice)  # on Linux, this changes only the calling thread
        if device.type == "cuda":
            torch.cuda.set_device(device)  # kernels are launched on the thread's current device
            torch.cuda.synchronize(device)  # weights and pool were created on another stream
            torch.cuda.set_stream(torch.cuda.Stream(device, priority=priority))
        if not warm:
            runner.warm_up()
        then()
        if nice:
            count_as_idle()  # called last, so that helper threads inherit the niceness, but not SCHED_IDLE

    return prepare
