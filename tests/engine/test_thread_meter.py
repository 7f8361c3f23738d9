"""The meter of a thread, on real threads. Every bound is far below what was spent."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from baton.engine.runner.thread_meter import ThreadMeter, ThreadTimes

SPENT_S = 0.05


def spin(seconds: float = SPENT_S) -> None:
    """On a core for so long, however long that takes."""
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


class Finalized:
    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        spin()


def collect() -> None:
    Finalized()
    gc.collect()


def metered(here: bool, work: object = spin) -> ThreadTimes:
    """What a meter of this thread reads around work done here, or on another thread."""
    meter = ThreadMeter(beside=threading.get_native_id())
    try:
        before = meter.read()
        assert callable(work)
        if here:
            work()
        else:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(work).result()
        return ThreadTimes(*(now - then for now, then in zip(meter.read(), before, strict=True)))
    finally:
        meter.close()


def test_own_work_and_that_of_others() -> None:
    assert metered(here=True).running_s >= 0.9 * SPENT_S
    elsewhere = metered(here=False)
    assert elsewhere.others_s >= 0.9 * SPENT_S > elsewhere.running_s


def test_collections_on_this_thread_and_on_others() -> None:
    assert metered(here=True, work=collect).own_collections_s >= 0.9 * SPENT_S
    elsewhere = metered(here=False, work=collect)
    assert elsewhere.other_collections_s >= 0.9 * SPENT_S > elsewhere.own_collections_s


def test_collection_counts_while_it_is_under_way() -> None:
    read: list[ThreadTimes] = []
    meter = ThreadMeter()
    began = meter.read()

    class Reads(Finalized):
        def __del__(self) -> None:
            with ThreadPoolExecutor(1) as pool:  # of a meter of another thread than the collecting one
                pool.submit(spin).result()
            read.append(meter.read())

    def collects() -> None:
        Reads()
        gc.collect()

    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(collects).result()
    finally:
        meter.close()
    assert read[0].other_collections_s - began.other_collections_s >= 0.9 * SPENT_S


def test_closed_meter_leaves_nothing_behind() -> None:
    before = list(gc.callbacks)
    ThreadMeter().close()
    assert gc.callbacks == before
