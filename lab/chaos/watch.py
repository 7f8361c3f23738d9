"""Observation of processes through /proc: memory, descriptors and threads once a second, and their growth."""

import asyncio
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

POOL = "memfd:baton-kv-pool"
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PERIOD_S = 1.0
LOOK_BYTES = 320  # memory that this process needs for one sample
HARNESS = "harness"  # name of this process, with the supervisor, proxies, clients and histories
SHARED_MEMORY = Path("/dev/shm")
WARM_UP_S = 30.0
LEAST_S = 60.0  # growth of a process is judged if it ran for this long after its warm-up
ENDS = 6  # number of parts into which a process's samples are split; the first and the last part's medians are compared
BOUND_BYTES = 12 << 20
BOUND_ROUTER_BYTES = 24 << 20  # higher, since routers fill 512 explanations of 14 KiB and 256 timelines of 28 KiB
BOUND_DESCRIPTORS = 32  # allows for other processes, which connect and disconnect
BOUND_HARNESS_DESCRIPTORS = 128  # three per client connection: the client's and both sides of the proxy's
BOUND_THREADS = 8


@dataclass(frozen=True, slots=True)
class Life:
    """Identity of a process: pid and start time, since a pid may be reused."""

    pid: int
    started_ticks: int  # start time in clock ticks since boot


@dataclass(frozen=True, slots=True)
class Sizes:
    rss_bytes: int
    private_bytes: int  # resident memory without shared memory (KV pools) and mapped files
    descriptors: int
    threads: int


def life_of(pid: int) -> Life | None:
    """Return the identity of a process; None if it is gone or a zombie."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else Life(pid, int(fields[19]))


def is_alive(life: Life) -> bool:
    return life_of(life.pid) == life


def state_of(pid: int) -> str:
    """Return the state letter of a process, for example T if stopped (proc(5)); empty if there is no such process."""
    fields = _stat(pid)
    return "" if fields is None else fields[0]


def sizes_of(pid: int) -> Sizes | None:
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
        descriptors = _descriptors(pid)
        threads = len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208
    except (OSError, ValueError):
        return None
    return Sizes(resident * PAGE_BYTES, (resident - shared) * PAGE_BYTES, descriptors, threads)


def _descriptors(pid: int) -> int:
    """Count the open descriptors of a process, except those of KV files that still exist."""
    folder, count = f"/proc/{pid}/fd", 0
    for name in os.listdir(folder):  # noqa: PTH208 -- called every second for many processes
        try:
            count += not os.readlink(f"{folder}/{name}").endswith(".kv")  # noqa: PTH115
        except FileNotFoundError:
            continue  # the descriptor was closed after listdir
    return count


def children_of(pid: int) -> list[int]:
    """Return the pids of all descendants of a process."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) is not None:
            parents[int(entry.name)] = int(fields[1])
    found, line = [], [pid]
    while line:
        parent = line.pop()
        below = [child for child, its in parents.items() if its == parent]
        found += below
        line += below
    return found


def pool_range(pid: int) -> range | None:
    """Return the address range of a process's KV pool; None if it has no pool."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return None
    found = re.search(rf"^([0-9a-f]+)-([0-9a-f]+) rw-s .*{POOL}", maps, re.MULTILINE)
    return range(int(found[1], 16), int(found[2], 16)) if found else None


def read_memory(pid: int, address: int, count: int) -> bytes:
    """Read memory of a process. Raises: OSError."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(count) or b""


def write_memory(pid: int, address: int, data: bytes) -> None:
    """Write memory of a process through /proc/PID/mem, since no other process can map its pool writable.

    Raises: OSError.
    """
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(address)
        memory.write(data)


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat, beginning with the state; None if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None


class Background(ABC):
    """Background task that runs from `start` to `stop`, each called at most once."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop the task, if it was started."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @abstractmethod
    async def _run(self) -> None:
        """Run until cancelled."""


@dataclass(frozen=True, slots=True)
class Look:
    at_s: float
    name: str
    pid: int
    rss_bytes: int
    descriptors: int
    threads: int
    private_bytes: int = 0  # as in `Sizes`, but without the histories and samples that the harness keeps


class ProcessWatch(Background):
    """Samples memory, descriptors and threads of processes from `start` to `stop`.

    `pids`: returns the current pids by name. `written_bytes`: returns the memory of the histories that this process
    keeps until the end of the run.
    """

    def __init__(self, pids: Callable[[], Mapping[str, int]], written_bytes: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self._pids = pids
        self._written_bytes = written_bytes
        self.looks: list[Look] = []
        self.longest_lag_s = 0.0  # longest delay of this process's event loop, on which proxies and clients run

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


@dataclass(frozen=True, slots=True)
class MemoryGrowth:
    """Growth of one process after its warm-up, in which caches fill, connections open and the allocator creates arenas.

    Only private memory is judged, because pages of KV pools are shared, of known size, and become resident at first
    use. A process may grow by `bound_bytes` in total, however long it runs, for bounded records and the allocator's
    fragmentation. A leak of one object per token or request exceeds every bound that does not grow with time.
    """

    name: str
    pid: int
    seconds: float
    rss_bytes: int  # resident memory in the last sample
    private_bytes: tuple[int, int]  # medians of the first and last part of the samples, as for all other pairs
    descriptors: tuple[int, int]
    threads: tuple[int, int]

    @property
    def grown_bytes(self) -> int:
        return self.private_bytes[1] - self.private_bytes[0]

    @property
    def bound_bytes(self) -> int:
        return BOUND_ROUTER_BYTES if self.name.startswith("router") else BOUND_BYTES

    @property
    def per_minute(self) -> float:
        """Growth of private memory, in bytes per minute."""
        return 60 * self.grown_bytes / (self.seconds * (1 - 1 / ENDS))

    @property
    def is_flat(self) -> bool:
        descriptors = BOUND_HARNESS_DESCRIPTORS if self.name == HARNESS else BOUND_DESCRIPTORS
        return (
            self.grown_bytes <= self.bound_bytes
            and self.descriptors[1] - self.descriptors[0] <= descriptors
            and self.threads[1] - self.threads[0] <= BOUND_THREADS
        )


def growth(looks: Sequence[Look], warm_up_s: float = WARM_UP_S, least_s: float = LEAST_S) -> list[MemoryGrowth]:
    """Return the growth of every process that ran for at least `least_s` after its warm-up."""
    lives: dict[tuple[str, int], list[Look]] = {}
    for look in looks:
        lives.setdefault((look.name, look.pid), []).append(look)
    found = []
    for (name, pid), life in sorted(lives.items()):
        settled = [look for look in life if look.at_s >= life[0].at_s + warm_up_s]
        if len(settled) < ENDS or settled[-1].at_s - settled[0].at_s < least_s:
            continue
        part = len(settled) // ENDS
        first, last = settled[:part], settled[-part:]

        def ends(of: str, first: Sequence[Look] = first, last: Sequence[Look] = last) -> tuple[int, int]:
            before, after = (round(median(getattr(look, of) for look in looks)) for looks in (first, last))
            return before, after

        seconds, rss_bytes = settled[-1].at_s - settled[0].at_s, settled[-1].rss_bytes
        found.append(
            MemoryGrowth(name, pid, seconds, rss_bytes, ends("private_bytes"), ends("descriptors"), ends("threads"))
        )
    return found
