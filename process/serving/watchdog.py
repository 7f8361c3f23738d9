"""Watchdog: ends a process whose engine or event loop makes no progress, since its requests would hang forever.

A thread checks counters that increase while there is progress. If a counter does not change for too long, the thread
writes all stacks to stderr, and the process exits with STALLED; its supervisor restarts it.

If C code holds the GIL, the thread cannot run. So it sends a heartbeat at each check to a sibling process
(`watchdog_sibling.py`), which makes this process write its stacks and kills it if the heartbeats stop.
"""

import faulthandler
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from baton.process.serving import watchdog_sibling
from baton.process.serving.exit_codes import ExitCode

logger = logging.getLogger(__name__)
STDERR = 2
CHECKS = 20  # number of checks within the maximum time without progress
BEATS = 4  # number of an event loop's heartbeats within the maximum time without progress
SIBLING_END_S = 5.0

Progress = Callable[[], int | None]
"""Function that returns a counter; None while there is nothing to watch."""


class ProgressTimer:
    """Time since a counter last changed, not counting time in which this process was stopped. Pure."""

    def __init__(self, longest_check_s: float) -> None:
        """Create a timer. `longest_check_s`: maximum that the time between two checks counts. If more time passes, the
        process was stopped.
        """
        self._longest_check_s = longest_check_s
        self._number: int | None = None
        self._checked_at: float | None = None
        self._still_s = 0.0

    def observe(self, number: int | None, now: float) -> float:
        """Record the counter's value at `now` (monotonic seconds); return the seconds since it last changed."""
        moved = number is None or number != self._number or self._checked_at is None
        since_s = 0.0 if self._checked_at is None else now - self._checked_at
        self._still_s = 0.0 if moved else self._still_s + min(since_s, self._longest_check_s)
        self._number, self._checked_at = number, now
        return self._still_s


def end_process(name: str, still_s: float) -> None:
    """Log which part makes no progress, write all stacks to stderr, and exit."""
    logger.critical("the %s has made no progress for %.1f s: the process exits", name, still_s)
    faulthandler.dump_traceback(file=STDERR, all_threads=True)
    os._exit(ExitCode.STALLED)


class Watchdog:
    """Watchdog of a process. Call `watch` for each counter, `start`, and `close` before a watched part is stopped."""

    def __init__(
        self,
        bound_s: float,
        on_stall: Callable[[str, float], None] = end_process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a watchdog. `bound_s`: maximum time without progress. `on_stall` receives the counter's name and the
        seconds without progress.
        """
        self.bound_s = bound_s
        self._period_s = bound_s / CHECKS
        self._on_stall = on_stall
        self._clock = clock
        self._watched: dict[str, tuple[Progress, ProgressTimer]] = {}
        self._closing = threading.Event()
        self._sibling: _Sibling | None = None
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def watch(self, name: str, progress: Progress) -> None:
        """Watch a counter from the next check on; `progress` is called on the watchdog's thread."""
        self._watched[name] = (progress, ProgressTimer(2 * self._period_s))

    def look(self) -> None:
        now = self._clock()
        for name, (progress, timer) in list(self._watched.items()):
            still_s = timer.observe(progress(), now)
            if still_s > self.bound_s:
                self._on_stall(name, still_s)

    def start(self) -> None:
        self._sibling = _Sibling(self.bound_s, self._period_s)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._sibling is not None:
            self._sibling.close()

    def _run(self) -> None:
        while not self._closing.wait(self._period_s):
            if self._sibling is not None:
                self._sibling.beat()
            self.look()


class _Sibling:
    """Sibling process that kills this process after `bound_s` without heartbeats. If the sibling cannot start, only the
    watchdog's thread remains.
    """

    def __init__(self, bound_s: float, period_s: float) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        command = [sys.executable, "-I", "-S", watchdog_sibling.__file__, str(os.getpid()), str(bound_s), str(period_s)]
        try:
            faulthandler.register(watchdog_sibling.DUMP_SIGNAL, file=STDERR, all_threads=True)
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0)
            if self._process.stdin is not None:
                os.set_blocking(self._process.stdin.fileno(), False)
        except OSError as error:
            text = "the watchdog's helper did not start (%s): a process that hangs with the GIL will not be ended"
            logger.warning(text, error)

    def beat(self) -> None:
        if self._process is None or self._process.stdin is None:
            return
        try:
            self._process.stdin.write(b".")  # returns None if the pipe is full because the sibling is stopped
        except OSError as error:
            text = "the watchdog's helper is gone (%s): a process that hangs with the GIL will not be ended"
            logger.warning(text, error)
            self.close()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            process.wait(SIBLING_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
