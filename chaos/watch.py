"""Looks at the processes once a second during a run: memory, descriptors, threads. This process is one of them."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from chaos.background import Background
from chaos.procfs import sizes_of

PERIOD_S = 1.0
LOOK_BYTES = 320  # that one look takes here
HARNESS = "harness"  # this process: supervisor, proxies, clients, and what they write down
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Look:
    at_s: float
    name: str
    pid: int
    rss_bytes: int
    descriptors: int
    threads: int
    private_bytes: int = 0  # see `Sizes`; without what the harness has written down


class Watch(Background):
    """From `start` to `stop`. `pids` tells the processes of the moment by name; `written_bytes`, how much this process
    has written down that it will only look at in the end.
    """

    def __init__(self, pids: Callable[[], Mapping[str, int]], written_bytes: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self._pids = pids
        self._written_bytes = written_bytes
        self.looks: list[Look] = []
        self.longest_lag_s = 0.0  # of this process itself: proxies and clients stood still as long

    async def _run(self) -> None:
        while True:
            for name, pid in {**self._pids(), HARNESS: os.getpid()}.items():
                self._look(name, pid)
            due_s = time.monotonic() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self.longest_lag_s = max(self.longest_lag_s, time.monotonic() - due_s)

    def _look(self, name: str, pid: int) -> None:
        sizes = sizes_of(pid)
        if sizes is None:
            return
        written = self._written_bytes() + LOOK_BYTES * len(self.looks) if name == HARNESS else 0
        private_bytes = sizes.private_bytes - written
        self.looks.append(
            Look(time.monotonic(), name, pid, sizes.rss_bytes, sizes.descriptors, sizes.threads, private_bytes)
        )


def shared_memory_files() -> frozenset[str]:
    return frozenset(path.name for path in SHARED_MEMORY.iterdir())
