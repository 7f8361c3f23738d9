"""How long the threads of this process have waited for cores: what a look costs, and what it leaves behind."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.generation import cpu_wait
from baton.generation.cpu_wait import LOOKING_SHARE, ProcessQueue

OPEN_FILES = Path("/proc/self/fd")


class Clock:
    now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each look at the list of threads."""
    found: list[str] = []
    listdir = os.listdir

    def counted(path: str) -> list[str]:
        found.append(path)
        return listdir(path)

    monkeypatch.setattr(cpu_wait.os, "listdir", counted)
    return found


@pytest.fixture
def queue(clock: Clock, looks: list[str]) -> Iterator[ProcessQueue]:
    made = ProcessQueue(clock)
    yield made
    made.close()


def test_looks_take_a_small_share_of_the_time(queue: ProcessQueue, clock: Clock, looks: list[str]) -> None:
    queue.since_last_s()
    assert len(looks) == 1, "a look at once after the first"
    clock.now_s += 1.0 / LOOKING_SHARE  # no look takes a second
    queue.since_last_s()
    assert len(looks) == 2


def test_threads_that_ended_leave_no_file(queue: ProcessQueue, clock: Clock) -> None:
    def look() -> int:
        clock.now_s += 1.0 / LOOKING_SHARE
        queue.since_last_s()
        return len(list(OPEN_FILES.iterdir()))

    before, ends = look(), threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    beside = look()
    ends.set()
    thread.join()
    # The kernel may list a thread a moment longer than its end is known here.
    while (after := look()) >= beside and str(thread.native_id) in os.listdir(cpu_wait.TASKS):  # noqa: PTH208
        pass
    assert (beside, after) == (before + 1, before)


def test_a_closed_queue_leaves_no_file(clock: Clock) -> None:
    before = len(list(OPEN_FILES.iterdir()))
    ProcessQueue(clock).close()
    assert len(list(OPEN_FILES.iterdir())) == before
