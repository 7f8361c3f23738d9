"""Exit codes of our processes, which tell a supervisor whether another start could help."""

from enum import IntEnum


class ExitCode(IntEnum):
    """128 and more: a signal before the process served."""

    STOPPED = 0
    FAILED = 1  # lost a rank, the engine or its place in the cluster
    WRONG_CONFIGURATION = 2
    STALLED = 3  # see watchdog.py
    CANNOT_LISTEN = 4
    OUT_OF_MEMORY = 5


FINAL = frozenset({ExitCode.WRONG_CONFIGURATION, ExitCode.CANNOT_LISTEN})
"""Exit codes after which another start would end in the same way."""
