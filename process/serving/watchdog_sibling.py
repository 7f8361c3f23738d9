"""Sibling process of a watchdog: kills the watched process if the watchdog's thread does not run any more.

A long call of C code that holds the GIL blocks all Python threads, including the watchdog's. This process has its own
interpreter, and runs as a script without packages:

    python -I -S watchdog_sibling.py PID BOUND_S PERIOD_S     # heartbeats: any bytes on stdin
"""

import os
import select
import signal
import sys
import time
from collections.abc import Callable

STDIN, STDERR = 0, 2
DUMP_S = 0.5  # time for writing all stacks
DUMP_SIGNAL = signal.SIGRTMIN
"""Signal on which faulthandler writes the stacks of all threads, even if the GIL is held."""


def still_for(
    bound_s: float, period_s: float, hear: Callable[[], bool | None], is_stopped: Callable[[], bool]
) -> float | None:
    """Wait until there was no heartbeat for `bound_s`; return that time in seconds. None: the watched process ended.

    `hear` waits for at most `period_s`, and returns whether there was a heartbeat; None at the end of the stream. Time
    in which the watched process was stopped (SIGSTOP), or the sibling did not run, does not count.
    """
    still_s = 0.0
    while still_s <= bound_s:
        beat = hear()
        if beat is None:
            return None
        still_s = 0.0 if beat else still_s if is_stopped() else still_s + period_s
    return still_s


def is_stopped(pid: int) -> bool:
    try:
        stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.read(stat, 1 << 12).rpartition(b") ")[2][:1] in (b"T", b"t")
    finally:
        os.close(stat)


def main(pid: int, bound_s: float, period_s: float) -> None:
    of_others = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
    for number in of_others:
        signal.signal(number, signal.SIG_IGN)  # ignored, to survive until the watched process has drained

    def hear() -> bool | None:
        readable, _, _ = select.select([STDIN], [], [], period_s)
        if os.getppid() != pid or (readable and not os.read(STDIN, 1 << 12)):
            return None
        return bool(readable)

    still_s = still_for(bound_s, period_s, hear, lambda: is_stopped(pid))
    if still_s is not None:
        line = f"process {pid}: no Python has run for {still_s:.1f} s (interpreter lock held): killing the process\n"
        os.write(STDERR, line.encode())
        os.kill(pid, DUMP_SIGNAL)
        time.sleep(DUMP_S)
        if os.getppid() == pid:
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
