"""SIGTERM before a process serves. Process 1 of a container gets no signal for which it has no handler: a pod that is
deleted while it loads its model would go on loading, and then serve until it is killed.
"""

import os
import signal
from types import FrameType


def end_on_sigterm() -> None:
    """For the first line of a `__main__`: until `server.serve` takes over, SIGTERM ends the process at once."""
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)  # as a shell reports it; threads that load a model are not waited for
