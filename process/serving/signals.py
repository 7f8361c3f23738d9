"""The meaning of each signal in our processes; docs/reliability.md has the table.

Process 1 of a container gets no signal for which it has no handler: a pod that is deleted while it loads its model
would continue, and then serve until it is killed. So handlers are there from the first line of a process on.
"""

import asyncio
import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

STDERR = 2
SETTLE_S = 0.1
UNUSED = (signal.SIGUSR1, signal.SIGUSR2)
OF_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def prepare_signals() -> None:
    """Install handlers in the first line of a `__main__`: until `server.serve` takes over, SIGTERM and SIGINT end the
    process.

    So does SIGHUP at a terminal that closes. SIGQUIT writes all stacks to stderr at any time.
    """
    answer_quit()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    if not _has_terminal():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nothing to reload yet


def handle_hangup(leave: Callable[[], None], reload: Callable[[], None]) -> None:
    """Call `leave` on SIGHUP if the terminal of the process was closed, else `reload`, on the running event loop.

    A process that was started by nohup, or without a terminal, never leaves.
    """
    loop = asyncio.get_running_loop()
    may_leave = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()

    def decide() -> None:
        if may_leave and not _has_terminal():
            leave()
        else:
            reload()

    # The kernel takes the terminal from the processes of a session only after it has sent the signal.
    loop.add_signal_handler(signal.SIGHUP, lambda: loop.call_later(SETTLE_S, decide))


def answer_quit() -> None:
    """SIGQUIT writes all stacks to stderr, SIGUSR1 and SIGUSR2 do nothing; the process continues."""
    faulthandler.register(signal.SIGQUIT, file=STDERR, all_threads=True)
    for number in UNUSED:
        signal.signal(number, signal.SIG_IGN)


def leave_signals_to_parent() -> None:
    """Ignore the signals that the parent handles, in a process that ends with its parent, which may drain for long."""
    answer_quit()
    for number in OF_PARENT:
        signal.signal(number, signal.SIG_IGN)


def _has_terminal(stat: Path = Path("/proc/self/stat")) -> bool:
    """Return whether the process has a controlling terminal."""
    if not sys.platform.startswith("linux"):
        return os.isatty(STDERR)
    return int(stat.read_text().rpartition(") ")[2].split()[4]) != 0


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)  # as a shell reports it; threads that load a model are not waited for
