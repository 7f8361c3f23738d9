"""Ends a process in which something has stopped making progress: it would hold its requests, and look alive, for ever.

It watches numbers that move while all is well: turns of an engine's thread, turns of the event loop. A thread of its
own looks at them, so that neither can keep it from looking. One that stands still for too long has the stacks of
all threads written to stderr and the process ended with STALLED; its supervisor starts it again. Where a call of C
holds the interpreter's lock, that thread cannot run either: it sends a beat with each look to a sibling process, which
then writes the stacks and kills this one (`watchdog_sibling.py`).
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
LOOKS = 20  # in the time that something may stand still
BEATS = 4  # of an event loop, in the same time
SIBLING_END_S = 5.0

Progress = Callable[[], int | None]
"""A number that moves; None while there is nothing to watch."""


class Stillness:
    """Timer of a number that does not change, in time that this process has had. Pure."""

    def __init__(self, longest_look_s: float) -> None:
        """A process that was stopped did not have the time between two looks: no more than this of it counts."""
        self._longest_look_s = longest_look_s
        self._number: int | None = None
        self._looked_at: float | None = None
        self._still_s = 0.0

    def look(self, number: int | None, now: float) -> float:
        """Seconds without a move, as of `now` (monotonic)."""
        moved = number is None or number != self._number or self._looked_at is None
        since_s = 0.0 if self._looked_at is None else now - self._looked_at
        self._still_s = 0.0 if moved else self._still_s + min(since_s, self._longest_look_s)
        self._number, self._looked_at = number, now
        return self._still_s


def end_process(name: str, still_s: float) -> None:
    """Logs the name of what stands still and where every thread is; does not return."""
    logger.critical("the %s has made no progress for %.1f s: the process exits", name, still_s)
    faulthandler.dump_traceback(file=STDERR, all_threads=True)
    os._exit(ExitCode.STALLED)


class Watchdog:
    """Watchdog: `watch` the numbers, then `start`; `close` before a watched thread ends on purpose."""

    def __init__(
        self,
        bound_s: float,
        on_stall: Callable[[str, float], None] = end_process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a watchdog. `bound_s`: maximum time without progress. `on_stall` receives the name, and the
        seconds.
        """
        self.bound_s = bound_s
        self._period_s = bound_s / LOOKS
        self._on_stall = on_stall
        self._clock = clock
        self._watched: dict[str, tuple[Progress, Stillness]] = {}
        self._closing = threading.Event()
        self._sibling: _Sibling | None = None
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def watch(self, name: str, progress: Progress) -> None:
        """Watch a number from the next look on; `progress` is called on the watchdog's thread."""
        self._watched[name] = (progress, Stillness(2 * self._period_s))

    def look(self) -> None:
        now = self._clock()
        for name, (progress, stillness) in list(self._watched.items()):
            still_s = stillness.look(progress(), now)
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
    """The process that ends this one where no beat comes for `bound_s`. Without it the thread alone watches."""

    def __init__(self, bound_s: float, period_s: float) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        command = [sys.executable, "-I", "-S", watchdog_sibling.__file__, str(os.getpid()), str(bound_s), str(period_s)]
        try:
            faulthandler.register(watchdog_sibling.DUMP_SIGNAL, file=STDERR, all_threads=True)
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0)
            if self._process.stdin is not None:
                os.set_blocking(self._process.stdin.fileno(), False)
        except OSError as error:
            logger.warning("the watchdog has no sibling: a held interpreter lock will not end the process: %s", error)

    def beat(self) -> None:
        if self._process is None or self._process.stdin is None:
            return
        try:
            self._process.stdin.write(b".")  # None where the pipe is full, since the sibling is stopped
        except OSError as error:
            logger.warning("the watchdog's sibling is gone: %s", error)
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
