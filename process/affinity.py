"""CPU cores of this process: reading a list of them, staying on them, and letting others go first."""

import contextlib
import os
from pathlib import Path


class CoresUnavailable(Exception):
    """Error: this process may not run on the cores of its configuration."""


AUTOGROUP = Path("/proc/self/autogroup")  # of kernels that share out the CPU by session


def parse_cores(text: str) -> frozenset[int]:
    """Cores of a list as taskset writes it, for example `0,2-3`. Raises ValueError."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{text!r} is not a list of cores such as 0,2-3")
        cores.update(range(int(first), int(last if dash else first) + 1))
    if not cores:
        raise ValueError(f"{text!r} names no core")
    return frozenset(cores)


def current_cores() -> frozenset[int]:
    """The cores that the calling thread may run on."""
    return frozenset(os.sched_getaffinity(0))


def pin_process(cores: frozenset[int]) -> None:
    """Keep every thread of this process, and those it starts later, on `cores`. Raises: CoresUnavailable."""
    allowed = current_cores()
    if not cores <= allowed:
        raise CoresUnavailable(f"--cores: {sorted(cores - allowed)} are not available here, only {sorted(allowed)}")
    # A library that was imported before may have started threads: setting the process id alone would miss them.
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:
            continue  # that thread ended meanwhile


def lower_priority(nice: int) -> None:
    """Lower the priority behind other sessions, where Linux shares the CPU by session (autogroup) and a thread's nice
    value means nothing between two of them. Does nothing elsewhere, nor in a session that is not this process's own.
    """
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            AUTOGROUP.write_text(str(nice))
