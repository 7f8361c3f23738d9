"""Termination of processes that use a GPU, with their children, also when a signal ends this process."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

DEVICE_LOST = 75
"""Exit status of a process with a broken CUDA context: after an illegal access every later call fails."""
KILLED_S = 10.0  # longest wait for the exit of a killed process, whose memory the driver frees first


def end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a session leader with all its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_S)


ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def end_by_signals() -> None:
    """Raise SystemExit on SIGTERM, SIGINT and SIGHUP, so that context managers end all started processes."""
    for number in ENDING:
        signal.signal(number, _unwind)


@contextmanager
def signals_held() -> Iterator[None]:
    """Defer SIGTERM, SIGINT and SIGHUP to the end of the block, so that a child started in it is registered first."""
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
    for each in ENDING:  # ignored from now on: a second signal would interrupt the clean-up
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)
