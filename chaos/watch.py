"""Looks at the processes once a second during a run: memory, descriptors, threads."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos.procfs import sizes_of

PERIOD_S = 1.0
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Look:
    at_s: float
    name: str
    pid: int
    rss_bytes: int
    descriptors: int
    threads: int


class Watch:
    """From `start` to `stop`. `pids` tells the processes of the moment by name."""

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self._pids = pids
        self._task: asyncio.Task[None] | None = None
        self.looks: list[Look] = []
        self.longest_lag_s = 0.0  # of this process itself: proxies and clients stood still as long

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            for name, pid in self._pids().items():
                sizes = sizes_of(pid)
                if sizes is not None:
                    look = Look(time.monotonic(), name, pid, sizes.rss_bytes, sizes.descriptors, sizes.threads)
                    self.looks.append(look)
            due_s = time.monotonic() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self.longest_lag_s = max(self.longest_lag_s, time.monotonic() - due_s)


def shared_memory_files() -> frozenset[str]:
    return frozenset(path.name for path in SHARED_MEMORY.iterdir())


@dataclass(frozen=True, slots=True)
class Growth:
    """How one life of a process changed, from `settle_s` after its start on."""

    name: str
    pid: int
    seconds: float
    rss_bytes: int  # at its end
    rss_per_minute: float  # bytes, by least squares
    descriptors: tuple[int, int]  # at first and at last
    threads: tuple[int, int]


def growth(looks: Sequence[Look], settle_s: float = 20.0, least_s: float = 60.0) -> list[Growth]:
    """Of every life that lasted `least_s` after it had settled."""
    lives: dict[tuple[str, int], list[Look]] = {}
    for look in looks:
        lives.setdefault((look.name, look.pid), []).append(look)
    found = []
    for (name, pid), life in sorted(lives.items()):
        settled = [look for look in life if look.at_s >= life[0].at_s + settle_s]
        if len(settled) < 2 or settled[-1].at_s - settled[0].at_s < least_s:
            continue
        first, last = settled[0], settled[-1]
        slope = _slope([(look.at_s, float(look.rss_bytes)) for look in settled])
        descriptors, threads = (first.descriptors, last.descriptors), (first.threads, last.threads)
        found.append(Growth(name, pid, last.at_s - first.at_s, last.rss_bytes, 60 * slope, descriptors, threads))
    return found


def _slope(points: Sequence[tuple[float, float]]) -> float:
    middle_x = sum(x for x, _ in points) / len(points)
    middle_y = sum(y for _, y in points) / len(points)
    spread = sum((x - middle_x) ** 2 for x, _ in points)
    return sum((x - middle_x) * (y - middle_y) for x, y in points) / spread
