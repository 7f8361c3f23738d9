"""Masks are made beside the engine; one that takes long holds up no other."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from baton.engine.sampling.mask_threads import Mask, MaskThreads, wait
from baton.text.structured.library import GrammarFailed

BOUND_S = 10.0
BITS = torch.tensor([5], dtype=torch.uint8)


@pytest.fixture
def threads() -> Iterator[MaskThreads]:
    threads = MaskThreads(2)
    yield threads
    threads.close()


def asked(threads: MaskThreads, work: Callable[[], torch.Tensor]) -> Mask:
    mask = Mask(lambda _: work(), ())
    threads.submit(mask)
    return mask


def after(event: threading.Event) -> Callable[[], torch.Tensor]:
    def work() -> torch.Tensor:
        event.wait(BOUND_S)
        return BITS

    return work


def test_masks_and_errors_reach_their_requests(threads: MaskThreads) -> None:
    def fail() -> torch.Tensor:
        raise GrammarFailed("no way on")

    masks = [asked(threads, lambda: BITS), asked(threads, fail)]
    assert wait(masks, BOUND_S) == []
    assert masks[0].result() is BITS
    with pytest.raises(GrammarFailed, match="no way on"):
        masks[1].result()


def test_wait_is_bounded_and_names_late_masks(threads: MaskThreads) -> None:
    go = threading.Event()
    slow, quick = asked(threads, after(go)), asked(threads, lambda: BITS)
    assert wait([slow, quick], BOUND_S, first=True) in ([slow], [])
    assert wait([slow], 0.001) == [slow]
    go.set()
    assert wait([slow], BOUND_S) == []


def test_masks_behind_a_slow_one_are_computed_by_the_other_thread(threads: MaskThreads) -> None:
    """Asked for in one go, all may stand behind the slow one; the next that comes, be it nothing, helps them."""
    go = threading.Event()
    slow = asked(threads, after(go))
    others = [asked(threads, lambda: BITS) for _ in range(3)]
    threads.submit(Mask.of(BITS))
    assert wait(others, BOUND_S) == []
    assert not slow.is_ready
    go.set()


def test_queued_masks_are_dropped_at_close(monkeypatch: pytest.MonkeyPatch) -> None:
    go, begun, before = threading.Event(), threading.Event(), set(threading.enumerate())

    def work() -> torch.Tensor:
        begun.set()
        go.wait(BOUND_S)
        return BITS

    threads = MaskThreads(1)
    [thread] = set(threading.enumerate()) - before
    join = thread.join

    def let_go_and_join(timeout_s: float) -> None:
        go.set()
        join(timeout_s)

    monkeypatch.setattr(thread, "join", let_go_and_join)
    slow, other = asked(threads, work), asked(threads, lambda: BITS)
    assert begun.wait(BOUND_S)
    threads.close()
    assert slow.is_ready
    assert not other.is_ready


def test_threads_end_when_released() -> None:
    before = set(threading.enumerate())
    threads = MaskThreads(2)
    wait([asked(threads, lambda: BITS)], BOUND_S)
    mine = set(threading.enumerate()) - before
    assert len(mine) == 2
    del threads
    gc.collect()
    until = time.monotonic() + BOUND_S
    for thread in mine:
        thread.join(until - time.monotonic())
        assert not thread.is_alive()


def test_masks_are_computed_at_normal_priority_off_idle_cores() -> None:
    """A prefill worker's engine asks so; the same threads go on when the worker becomes a decode worker."""
    threads, made = MaskThreads(1), []
    core = min(os.sched_getaffinity(0))

    def work() -> torch.Tensor:
        made.append((os.sched_getscheduler(0), os.sched_getaffinity(0)))
        return BITS

    def ask() -> None:
        os.sched_setaffinity(0, {core})
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        assert wait([asked(threads, work)], BOUND_S) == []

    engine = threading.Thread(target=ask)
    engine.start()
    engine.join()
    threads.close()
    others = os.sched_getaffinity(0) - {core}
    assert made == [(os.SCHED_OTHER, others or {core})]
