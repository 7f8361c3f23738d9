"""Masks while they are being made, and the threads that make them, beside the forward pass."""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence, Set
from queue import Empty, SimpleQueue

import torch

CLOSE_TIMEOUT_S = 1.0  # for the masks that are being made
Allowed = torch.Tensor
"""uint8, one bit per token of the vocabulary, the least significant first: those that may come."""


class Mask:
    """Asked for by one thread, made by another, once."""

    __slots__ = ("_made", "_news", "_token_ids", "_work", "is_ready")

    def __init__(self, work: Callable[[Sequence[int]], Allowed], token_ids: Sequence[int]) -> None:
        """`work` makes it of these tokens."""
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
        """Of a mask that is ready. Raises the exception that making it raised, such as GrammarFailed."""
        if isinstance(self._made, BaseException):
            raise self._made
        if self._made is None:
            raise RuntimeError("the mask is not ready")
        return self._made

    def tell(self, news: "SimpleQueue[None]") -> None:
        """Puts something there once it is ready, unless it is so already."""
        self._news = news


def _raised(failure: Exception) -> Allowed:
    raise failure


def wait(masks: Sequence[Mask], timeout_s: float, first: bool = False) -> list[Mask]:
    """Until all of them are ready, or the `first` one is. Returns those that are not.

    Masks are mostly made in their order: a caller that waits for all of them waits for the last, and is woken once.
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
    """They move to other cores than those of the thread that asks for the first mask, where there are others.

    They begin with this object, and so with the priority of the thread that makes it: an engine's thread may count as
    idle, and a thread cannot leave that again. Until the first mask they sleep.
    Masks are begun in the order they come. A submitted mask wakes one thread, if one sleeps that has looked for work
    since the last was woken: so the many masks of a step wake one, and those behind one that takes long are made when
    another mask is submitted.
    """

    def __init__(self, count: int) -> None:
        self._masks: SimpleQueue[Mask | None] = SimpleQueue()
        self._engines: set[int] = set()  # cores of the thread that asks
        threads = [
            threading.Thread(target=_work, args=(self._masks, self._engines), name=f"masks_{number}", daemon=True)
            for number in range(count)
        ]
        self.close = weakref.finalize(self, _end, self._masks, threads)
        """Ends the threads; masks that are not begun are not made. At the latest when the interpreter ends."""
        for thread in threads:
            thread.start()

    def submit(self, mask: Mask) -> None:
        """One thread at a time may."""
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
        del mask  # its objects may be freed while this thread sleeps


def _end(masks: SimpleQueue[Mask | None], threads: Sequence[threading.Thread]) -> None:
    """An interpreter that ends under a thread inside the library would end with a fault: it is waited for."""
    with contextlib.suppress(Empty):
        while True:
            masks.get_nowait()
    for _ in threads:
        masks.put(None)
    until_s = time.monotonic() + CLOSE_TIMEOUT_S
    for thread in threads:
        if thread is not threading.current_thread():  # which may happen to collect garbage
            thread.join(max(0.0, until_s - time.monotonic()))


def _leave(engines: Set[int]) -> None:
    """The calling thread moves to the cores of the process that are not the engine's, if there are any."""
    if hasattr(os, "sched_setaffinity"):
        all_cores = os.sched_getaffinity(os.getpid())
        os.sched_setaffinity(0, (all_cores - engines) or all_cores)
