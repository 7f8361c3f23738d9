"""Masks of structured output, and the threads that compute them during the forward pass."""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence, Set
from queue import Empty, SimpleQueue

import torch

CLOSE_TIMEOUT_S = 1.0  # longest wait for masks in progress when the threads stop
Allowed = torch.Tensor
"""One bit per token of the vocabulary, set if the token is allowed, in uint8, the least significant bit first."""


class Mask:
    """Mask requested by one thread and computed once by another."""

    __slots__ = ("_made", "_news", "_token_ids", "_work", "is_ready")

    def __init__(self, work: Callable[[Sequence[int]], Allowed], token_ids: Sequence[int]) -> None:
        """Prepare a mask that `work` computes from `token_ids`."""
        self.is_ready = False
        self._work, self._token_ids = work, token_ids
        self._made: Allowed | BaseException | None = None
        self._news: SimpleQueue[None] | None = None

    @staticmethod
    def of(allowed: Allowed) -> "Mask":
        mask = Mask(lambda _: allowed, ())
        mask.make()
        return mask

    @staticmethod
    def failed(failure: Exception) -> "Mask":
        mask = Mask(lambda _: _raised(failure), ())
        mask.make()
        return mask

    def make(self) -> None:
        try:
            self._made = self._work(self._token_ids)
        except BaseException as failure:  # noqa: BLE001, raised again where the result is asked for
            self._made = failure
        self.is_ready = True
        if self._news is not None:
            self._news.put(None)

    def result(self) -> Allowed:
        """Return the mask if it is ready. Raises the exception of its computation, such as GrammarFailed."""
        if isinstance(self._made, BaseException):
            raise self._made
        if self._made is None:
            raise RuntimeError("the mask is not ready")
        return self._made

    def tell(self, news: "SimpleQueue[None]") -> None:
        """Put an item into `news` when the mask becomes ready."""
        self._news = news


def _raised(failure: Exception) -> Allowed:
    raise failure


def wait(masks: Sequence[Mask], timeout_s: float, first: bool = False) -> list[Mask]:
    """Wait until all masks are ready or, with `first`, until one is. Returns the masks that are not ready.

    To wait for all masks, wait for the last one: masks are mostly computed in order, so one wake-up is enough.
    """
    until_s = time.monotonic() + timeout_s
    news: SimpleQueue[None] = SimpleQueue()
    late = [mask for mask in masks if not mask.is_ready]
    while late and not (first and len(late) < len(masks)):
        awaited = late if first else late[-1:]
        for mask in awaited:
            mask.tell(news)
        if not any(mask.is_ready for mask in awaited):
            try:
                news.get(timeout=max(0.0, until_s - time.monotonic()))
            except Empty:
                return [mask for mask in late if not mask.is_ready]
        late = [mask for mask in late if not mask.is_ready]
    return late


class MaskThreads:
    """Threads that compute masks, if possible on other cores than those of the thread that requests the first mask.

    The threads start with this object and inherit the priority of its creator. Threads that an engine's thread started
    later might inherit an idle priority, which they could not leave. All sleep until the first mask is requested.

    Masks start in order of arrival. Submitting a mask wakes a sleeping thread unless one is already waking up. So the
    masks of a step, submitted together, wake one thread. If a slow mask delays them, the next submission wakes another.
    """

    def __init__(self, count: int) -> None:
        self._masks: SimpleQueue[Mask | None] = SimpleQueue()
        self._engines: set[int] = set()  # cores of the requesting thread
        threads = [
            threading.Thread(target=_work, args=(self._masks, self._engines), name=f"masks_{number}", daemon=True)
            for number in range(count)
        ]
        self.close = weakref.finalize(self, _end, self._masks, threads)
        """Stop the threads without starting queued masks; called at the latest when the interpreter exits."""
        for thread in threads:
            thread.start()

    def submit(self, mask: Mask) -> None:
        """Queue a mask to be computed. Only one thread at a time may call this."""
        if not self._engines and hasattr(os, "sched_getaffinity"):
            self._engines |= os.sched_getaffinity(0)
        self._masks.put(mask)


def _work(masks: SimpleQueue[Mask | None], engines: Set[int]) -> None:
    has_moved = False
    while (mask := masks.get()) is not None:
        if not has_moved:
            _leave(engines)
            has_moved = True
        mask.make()
        del mask  # frees its objects before this thread sleeps


def _end(masks: SimpleQueue[Mask | None], threads: Sequence[threading.Thread]) -> None:
    """Drop queued masks and stop the threads: an exit while one of them runs the library's code would crash."""
    with contextlib.suppress(Empty):
        while True:
            masks.get_nowait()
    for _ in threads:
        masks.put(None)
    until_s = time.monotonic() + CLOSE_TIMEOUT_S
    for thread in threads:
        if thread is not threading.current_thread():  # garbage collection may call this on a mask thread
            thread.join(max(0.0, until_s - time.monotonic()))


def _leave(engines: Set[int]) -> None:
    """Move the calling thread to cores of the process that are not the engine's, if there are any."""
    if hasattr(os, "sched_setaffinity"):
        all_cores = os.sched_getaffinity(os.getpid())
        os.sched_setaffinity(0, (all_cores - engines) or all_cores)
