"""How the time of one thread was spent: on a core, in the queue for one, behind the interpreter's lock."""

import gc
import threading
import time
from typing import Any, Literal, NamedTuple

from baton.text.cpu_wait import QueueTime


class ThreadTimes(NamedTuple):
    """Seconds since some moment; only differences mean something."""

    running_s: float  # this thread was on a core
    queued_s: float  # it could have run and no core was free; 0 where the system does not say
    others_s: float  # other threads of this process were on cores, all added up
    own_collections_s: float  # garbage collections on this thread
    other_collections_s: float  # and on others, which hold the interpreter's lock meanwhile
    lock_queued_s: float = 0.0  # one that may hold the lock could run and no core was free


class ThreadMeter:
    """Of the thread that makes it. A reading takes about 4 us."""

    def __init__(self, beside: int | None = None) -> None:
        """`beside`: native id of the other thread that runs Python most."""
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
        """To be called once."""
        gc.callbacks.remove(self._on_collection)
        self._queue.close()
        if self._queue_beside is not None:
            self._queue_beside.close()

    def _on_collection(self, phase: Literal["start", "stop"], _: dict[str, Any]) -> None:
        """Collections never overlap. One may let go of the interpreter's lock, in an object's finalizer."""
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
