"""The first work of an engine's thread: its cores, its priority, its CUDA stream, and the model."""

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.parallel.other_ranks import cores_of, threads_of
from baton.engine.parallel.shard import Shard
from baton.engine.runner.runner import Runner
from baton.kernels.native.library import native_library


class CoreUse:
    """Whether this process computes on its cores now: a byte in a file that other workers of the machine map too.

    A worker writes its own byte alone. A worker that reads it may use those cores meanwhile, behind all else that runs
    there (kernels/native/threads.cpp). Nothing is left to close: the mapping goes with the object.
    """

    def __init__(self, file: Path) -> None:
        """Raises: OSError where the file cannot be made."""
        self._byte = _mapped(file, mmap.ACCESS_WRITE)
        self.mark(False)

    def mark(self, computing: bool) -> None:
        self._byte[0] = computing


@dataclass(frozen=True, slots=True)
class SpareCores:
    """Of another process. `in_use`: its byte, `[1]`, mapped for reading alone."""

    cores: frozenset[int]
    in_use: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, cores: frozenset[int], file: Path) -> "SpareCores":
        """Raises: OSError. The first process makes the file."""
        return cls(cores, np.frombuffer(_mapped(file, mmap.ACCESS_READ), np.uint8))


def _mapped(file: Path, access: int) -> mmap.mmap:
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_size == 0:
            os.ftruncate(descriptor, 1)
        return mmap.mmap(descriptor, 1, access=access)
    finally:
        os.close(descriptor)


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
    """The first work of the engine's thread: stay on its cores, use as many threads as there are, warm the model.

    `cores` are those of all ranks, of which the thread takes the first one's. `nice`: how far it, and the threads that
    it starts, stand back behind whatever else wants these cores. `priority`: of its CUDA stream; less comes first.
    `warm`: another thread has warmed this model up before, and blocks are owned by now. `spare`: see SpareCores.
    `then`: what else is to be computed on the thread before its first step.
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
            os.setpriority(os.PRIO_PROCESS, 0, nice)  # Linux: of this thread alone
        if device.type == "cuda":
            torch.cuda.set_device(device)  # kernels are launched on the thread's current device
            torch.cuda.synchronize(device)  # weights and pool were made on another stream
            torch.cuda.set_stream(torch.cuda.Stream(device, priority=priority))
        if not warm:
            runner.warm_up()
        then()
        if nice:
            count_as_idle()  # not before: the threads that help it to compute have only its niceness

    return prepare
