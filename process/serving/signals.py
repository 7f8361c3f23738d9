"""Signal handlers of all processes; docs/reliability.md has the table.

The kernel delivers a signal to process 1 of a container only if the process has a handler for it. Without handlers, a
deleted pod would continue to load its model, so the first line of a process installs them.
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
    """Install the handlers for the start of a process: SIGTERM, SIGINT and a closed terminal end the process.

    `serve` replaces these handlers. SIGQUIT writes all stacks to stderr at any time.
    """
    answer_quit()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    if not _has_terminal():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # ignored without a terminal: nothing to reload yet


def handle_hangup(leave: Callable[[], None], reload: Callable[[], None]) -> None:
    """Handle SIGHUP on the event loop: call `leave` if the process's terminal was closed, else `reload`.

    A process started with nohup or without a terminal never leaves.
    """
    loop = asyncio.get_running_loop()
    may_leave = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()

    def decide() -> None:
        if may_leave and not _has_terminal():
            leave()
        else:
            reload()

    # The kernel detaches the terminal only after sending the signal.
    loop.add_signal_handler(signal.SIGHUP, lambda: loop.call_later(SETTLE_S, decide))


def answer_quit() -> None:
    """Handle SIGQUIT by writing all stacks to stderr, and ignore SIGUSR1 and SIGUSR2. The process continues."""
    faulthandler.register(signal.SIGQUIT, file=STDERR, all_threads=True)
    for number in UNUSED:
        signal.signal(number, signal.SIG_IGN)


def leave_signals_to_parent() -> None:
    """Ignore SIGINT, SIGTERM and SIGHUP in a helper process: its parent handles them and then ends the helper."""
    answer_quit()
    for number in OF_PARENT:
        signal.signal(number, signal.SIG_IGN)


def _has_terminal(stat: Path = Path("/proc/self/stat")) -> bool:
    """Return whether the process has a controlling terminal."""
    if not sys.platform.startswith("linux"):
        return os.isatty(STDERR)
    return int(stat.read_text().rpartition(") ")[2].split()[4]) != 0


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)  # a shell's exit code; no wait for threads that load a model
