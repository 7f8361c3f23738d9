"""CPU cores of this process: lists of cores, pinning, and priority."""

import contextlib
import os
from pathlib import Path


class CoresUnavailable(Exception):
    """Error: this process may not run on the configured cores."""


AUTOGROUP = Path("/proc/self/autogroup")  # exists on kernels that share CPU time between sessions


def parse_cores(text: str) -> frozenset[int]:
    """Parse a list of cores as taskset writes it, for example `0,2-3`. Raises: ValueError."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{text!r} is not a list of cores such as 0,2-3")
        cores.update(range(int(first), int(last if dash else first) + 1))
    if not cores:
        raise ValueError(f"{text!r} contains no core")
    return frozenset(cores)


def current_cores() -> frozenset[int]:
    """Return the cores that the calling thread may run on."""
    return frozenset(os.sched_getaffinity(0))


def pin_process(cores: frozenset[int]) -> None:
    """Pin every thread of this process, and those it starts later, to `cores`. Raises: CoresUnavailable."""
    allowed = current_cores()
    if not cores <= allowed:
        raise CoresUnavailable(f"--cores: {sorted(cores - allowed)} are not available here, only {sorted(allowed)}")
    # Imported libraries may have started threads, and a call with the process id sets only the main thread.
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:
            continue  # the thread has exited


def lower_priority(nice: int) -> None:
    """Lower the CPU priority of this process's session, unless other processes share the session.

    If Linux shares the CPU by session (autogroup), a thread's nice value has no effect on threads of other sessions.
    """
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            AUTOGROUP.write_text(str(nice))
