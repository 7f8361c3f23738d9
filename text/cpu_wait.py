"""How long threads have waited for a core, by the statistics of Linux's scheduler. Elsewhere all of it is 0."""

import errno
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

TASKS = "/proc/self/task"  # of each thread `schedstat` has ns on a core, ns in the queue for one, turns
NS = 1e-9
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
LOOKING_SHARE = 0.002  # of the time
LONG_AGO_S = 0.15  # a wait since then may have been at any time


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
        self._waits_ns = self._read_ns()
        self._looked_s, self._due_s = now_s(), 0.0
        self._share = 0.0

    def share(self) -> float:
        """Of the time since the look before: what the two threads waited that waited longest, as all wait at once.

        0 where that look was long ago. Without a new look, what the last one saw, where that was just now.
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
        """To be called once."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _threads(self) -> Sequence[str]:
        """All threads; without a free descriptor those that are known."""
        try:
            return os.listdir(TASKS)  # noqa: PTH208 -- a third of the time
        except OSError as error:
            if error.errno == errno.ENOENT:
                return ()
            if error.errno not in _NO_DESCRIPTOR:
                raise
            return list(self._files)

    def _read_ns(self) -> dict[str, int]:
        """By thread."""
        waits_ns = {}
        for thread in self._threads():
            try:
                if thread not in self._files:
                    self._files[thread] = os.open(f"{TASKS}/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
                waits_ns[thread] = int(os.pread(self._files[thread], 64, 0).split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended since it was listed, or the system has no such file
            except OSError as error:
                if error.errno not in _NO_DESCRIPTOR:
                    raise
        for ended in self._files.keys() - waits_ns.keys():
            os.close(self._files.pop(ended))
        return waits_ns
