"""How long threads have waited for a core, by the statistics of Linux's scheduler. Elsewhere all of it is 0."""

import os
import time
from collections.abc import Callable
from pathlib import Path

TASKS = "/proc/self/task"  # of each thread `schedstat` has ns on a core, ns in the queue for one, turns
NS = 1e-9
LOOKING_SHARE = 0.002  # of the time


class QueueTime:
    """Of one thread of this process. A reading takes about 1 us."""

    def __init__(self, thread: int) -> None:
        """`thread`: its native id."""
        path = Path(TASKS, str(thread), "schedstat")
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if path.exists() else None

    def read_s(self) -> float:
        """Seconds since it began. A wait counts when it has ended."""
        return 0.0 if self._file is None else int(os.pread(self._file, 64, 0).split()[1]) * NS

    def close(self) -> None:
        """To be called once."""
        if self._file is not None:
            os.close(self._file)


class ProcessQueue:
    """Of the threads of this process by which something passes one after another.

    A look takes about 2 us a thread, and all looks together `LOOKING_SHARE` of the time at most.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._files: dict[str, int] = {}  # by thread
        self._waits_ns: dict[str, int] = {}
        self._due_s = 0.0
        self.since_last_s()

    def since_last_s(self) -> float:
        """Since the look before, of the two threads that waited longest: all wait at once, and two of them in turn.

        0, without a look, where one would come too soon after the one before.
        """
        if self._now_s() < self._due_s:
            return 0.0
        began_s = time.thread_time()
        before, self._waits_ns = self._waits_ns, self._read_ns()
        self._due_s = self._now_s() + (time.thread_time() - began_s) / LOOKING_SHARE
        waited = sorted(now - before.get(thread, now) for thread, now in self._waits_ns.items())
        return sum(waited[-2:]) * NS

    def close(self) -> None:
        """To be called once."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _read_ns(self) -> dict[str, int]:
        """By thread."""
        waits_ns = {}
        for thread in os.listdir(TASKS) if Path(TASKS).exists() else ():  # noqa: PTH208 -- a third of the time
            try:
                if thread not in self._files:
                    self._files[thread] = os.open(f"{TASKS}/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
                waits_ns[thread] = int(os.pread(self._files[thread], 64, 0).split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended since it was listed, or the system has no such file
        for ended in self._files.keys() - waits_ns.keys():
            os.close(self._files.pop(ended))
        return waits_ns
