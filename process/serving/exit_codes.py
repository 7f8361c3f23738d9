"""Exit codes, which tell a supervisor whether a restart could help."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of Baton's processes. 128 + N: signal N ended the process before it served."""

    STOPPED = 0
    FAILED = 1  # a rank or the engine failed, or another process has the worker id
    WRONG_CONFIGURATION = 2
    STALLED = 3  # ended by the watchdog
    CANNOT_LISTEN = 4
    OUT_OF_MEMORY = 5


FINAL = frozenset({ExitCode.WRONG_CONFIGURATION, ExitCode.CANNOT_LISTEN})
"""Exit codes after which a restart would fail again."""
