"""Time of one thread: on a core, waiting for a core, waiting for the interpreter's lock."""

import gc
import threading
import time
from typing import Any, Literal, NamedTuple

from baton.text.cpu_wait import QueueTime


class ThreadTimes(NamedTuple):
    """Times of a thread in seconds since an arbitrary moment; only differences are meaningful."""

    running_s: float  # time of this thread on a core
    queued_s: float  # time of this thread waiting for a core, ready to run; 0 if the system does not report it
    others_s: float  # time of all other threads of this process on cores
    own_collections_s: float  # garbage collections on this thread
    other_collections_s: float  # garbage collections on other threads, which hold the interpreter's lock
    lock_queued_s: float = 0.0  # time for which the thread that most often holds the lock waited for a core

    def since(self, before: "ThreadTimes") -> "ThreadTimes":
        """Return the times between an earlier reading and this one."""
        return ThreadTimes(
            self.running_s - before.running_s,
            self.queued_s - before.queued_s,
            self.others_s - before.others_s,
            self.own_collections_s - before.own_collections_s,
            self.other_collections_s - before.other_collections_s,
            self.lock_queued_s - before.lock_queued_s,
        )


class ThreadMeter:
    """Measures the times of the thread that creates this object. A reading takes about 4 µs."""

    def __init__(self, beside: int | None = None) -> None:
        """Start measuring. `beside`: native id of the other thread that most often holds the interpreter's lock."""
        self._thread = threading.get_ident()
        self._queue = QueueTime(threading.get_native_id())
        self._queue_beside = None if beside is None else QueueTime(beside)
        self._under_way: _Collection | None = None
        self._own_s = self._other_s = 0.0
        gc.callbacks.append(self._on_collection)

    def read(self) -> ThreadTimes:
        running_s, under_way = time.thread_time(), self._under_way
        other_s = self._other_s
        if under_way is not None and under_way.thread != self._thread:
            other_s += time.perf_counter() - under_way.began_s
        others_s = time.process_time() - running_s
        queued_s = self._queue.read_s()
        lock_queued_s = 0.0 if self._queue_beside is None else self._queue_beside.read_s()
        return ThreadTimes(running_s, queued_s, others_s, self._own_s, other_s, lock_queued_s)

    def close(self) -> None:
        """Stop measuring. Call it once."""
        gc.callbacks.remove(self._on_collection)
        self._queue.close()
        if self._queue_beside is not None:
            self._queue_beside.close()

    def _on_collection(self, phase: Literal["start", "stop"], _: dict[str, Any]) -> None:
        """Add up the times of garbage collections, which never overlap.

        Other threads may run during a collection, since an object's finalizer may release the interpreter's lock.
        """
        now, thread = time.perf_counter(), threading.get_ident()
        under_way, self._under_way = self._under_way, _Collection(thread, now) if phase == "start" else None
        if under_way is None:
            return
        if under_way.thread == self._thread:
            self._own_s += now - under_way.began_s
        else:
            self._other_s += now - under_way.began_s


class _Collection(NamedTuple):
    thread: int
    began_s: float
