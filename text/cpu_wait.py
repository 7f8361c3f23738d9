"""Time that threads waited for a CPU core, from Linux's scheduler statistics; 0 on other systems."""

import errno
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

TASKS = "/proc/self/task"  # has `schedstat` per thread: ns running, ns waiting, time slices
NS = 1e-9
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
LOOKING_SHARE = 0.002  # maximum fraction of the time spent reading the statistics
LONG_AGO_S = 0.15  # age from which a reading says nothing about the present


class QueueTime:
    """Waiting time of one thread of this process. A reading takes about 1 µs."""

    def __init__(self, thread: int) -> None:
        """Open the statistics of a thread, by its native id."""
        path = Path(TASKS, str(thread), "schedstat")
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if path.exists() else None

    def read_s(self) -> float:
        """Return the total waiting time since the thread's start, in seconds, without a wait that still continues."""
        return 0.0 if self._file is None else int(os.pread(self._file, 64, 0).split()[1]) * NS

    def close(self) -> None:
        """Close the file; call once."""
        if self._file is not None:
            os.close(self._file)


class ProcessQueue:
    """Waiting times of all threads of this process. Each token passes through two of these threads.

    A reading takes about 2 µs per thread, and all readings at most `LOOKING_SHARE` of the time.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._files: dict[str, int] = {}  # file descriptor of each thread's statistics, by thread
        self._waits_ns = self._read_ns()
        self._looked_s, self._due_s = now_s(), 0.0
        self._share = 0.0

    def share(self) -> float:
        """Return the sum of the waits of the two longest waiting threads, over the time since the last reading.

        Return 0 if the last reading is more than LONG_AGO_S old. Return the previous result if no new reading is due.
        """
        now_s = self._now_s()
        if now_s < self._due_s:
            return self._share
        began_s = time.thread_time()
        before, self._waits_ns = self._waits_ns, self._read_ns()
        self._due_s = now_s + (time.thread_time() - began_s) / LOOKING_SHARE
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        waited = sorted(now - before.get(thread, now) for thread, now in self._waits_ns.items())
        self._share = sum(waited[-2:]) * NS / passed_s if 0.0 < passed_s <= LONG_AGO_S else 0.0
        return self._share

    def close(self) -> None:
        """Close all files; call once."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _threads(self) -> Sequence[str]:
        """Return the ids of all threads; if no file descriptor is free, only those whose statistics are open."""
        try:
            return os.listdir(TASKS)  # noqa: PTH208 -- a third of the time
        except OSError as error:
            if error.errno == errno.ENOENT:
                return ()
            if error.errno not in _NO_DESCRIPTOR:
                raise
            return list(self._files)

    def _read_ns(self) -> dict[str, int]:
        """Return the waiting time in ns by thread."""
        waits_ns = {}
        for thread in self._threads():
            try:
                if thread not in self._files:
                    self._files[thread] = os.open(f"{TASKS}/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
                waits_ns[thread] = int(os.pread(self._files[thread], 64, 0).split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # the thread has exited, or the system has no such file
            except OSError as error:
                if error.errno not in _NO_DESCRIPTOR:
                    raise
        for ended in self._files.keys() - waits_ns.keys():
            os.close(self._files.pop(ended))
        return waits_ns
