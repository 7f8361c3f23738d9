"""How long the threads of this process have waited for cores: what a look costs, and what it leaves behind."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from baton.text import cpu_wait
from baton.text.cpu_wait import LONG_AGO_S, LOOKING_SHARE, ProcessQueue
from tests.fixtures.loop_clock import Clock

OPEN_FILES = Path("/proc/self/fd")
WITHIN_S = 10.0


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


@pytest.fixture
def waits_ns(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """By thread, what the next look finds."""
    waits: dict[str, int] = {}
    monkeypatch.setattr(ProcessQueue, "_read_ns", lambda _: dict(waits))
    return waits


def test_samples_take_a_small_share_of_the_time(queue: ProcessQueue, clock: Clock, looks: list[str]) -> None:
    clock.now_s += 1.0 / LOOKING_SHARE  # no look takes a second
    for _ in range(3):
        queue.share()
    assert len(looks) == 2, "the first, and one of three at once"
    clock.now_s += 1.0 / LOOKING_SHARE
    queue.share()
    assert len(looks) == 3


def test_share_is_of_the_two_that_waited_longest(clock: Clock, waits_ns: dict[str, int]) -> None:
    waits_ns |= {"1": 5, "2": 5, "3": 5}
    queue = ProcessQueue(clock)
    clock.now_s += 0.1
    waits_ns |= {"1": 5 + 10**7, "2": 5 + 2 * 10**7, "3": 5 + 4 * 10**7, "4": 10**9}  # the last is new
    assert queue.share() == pytest.approx(0.6)


def test_wait_of_unknown_time_counts_for_nothing(clock: Clock, waits_ns: dict[str, int]) -> None:
    waits_ns["1"] = 0
    queue = ProcessQueue(clock)
    clock.now_s += 2 * LONG_AGO_S
    waits_ns["1"] = 10**9
    assert queue.share() == 0.0


def open_threads() -> list[str]:
    """Of which a file is open, by the number of each."""
    links: list[Path] = []
    for link in OPEN_FILES.iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile, as that of the folder itself
            links.append(link.readlink())
    return sorted(link.parent.name for link in links if link.name == "schedstat")


def test_threads_that_ended_leave_no_file(queue: ProcessQueue, clock: Clock) -> None:
    def look() -> list[str]:
        clock.now_s += 1.0 / LOOKING_SHARE
        queue.share()
        return open_threads()

    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    number, beside = str(thread.native_id), look()
    ends.set()
    thread.join()
    assert beside.count(number) == 1
    deadline_s = time.monotonic() + WITHIN_S  # the kernel may list a thread a little longer than its end is known here
    while number in look() and time.monotonic() < deadline_s:
        pass
    assert number not in look()


def test_closed_queue_leaves_no_file(clock: Clock) -> None:
    own = str(threading.get_native_id())
    before, queue = open_threads().count(own), ProcessQueue(clock)
    assert open_threads().count(own) == before + 1
    queue.close()
    assert open_threads().count(own) == before


def test_samples_without_a_free_descriptor_follow_known_threads(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = ProcessQueue(clock)
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()

    def full(*arguments: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        clock.now_s += 1.0 / LOOKING_SHARE
        queue.share()
        patch.setattr(os, "listdir", full)
        clock.now_s += 1.0 / LOOKING_SHARE
        queue.share()
    known = open_threads()
    ends.set()
    thread.join()
    queue.close()
    assert str(threading.get_native_id()) in known and str(thread.native_id) not in known
