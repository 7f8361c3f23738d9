"""Termination of processes that use a GPU: the complete group, within a bound, also when a signal ends this process."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

DEVICE_LOST = 75
"""Exit status of a process whose CUDA context something has broken: after an illegal access every later call fails."""
KILLED_S = 10.0  # that a killed process may take to be gone: the driver takes its memory back first


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process that began a session of its own, with all its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_S)


ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def end_by_signals() -> None:
    """A signal that ends this process unwinds it, so that nothing that it started stays behind."""
    for number in ENDING:
        signal.signal(number, _unwind)


@contextmanager
def signals_held() -> Iterator[None]:
    """Defer the signals that end this process to the end of the block, so that a child started in it is known and ended
    too.
    """
    came: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: came.append(number)) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _unwind(number: int, _: object) -> None:
    for each in ENDING:  # a second one would interrupt that
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)
