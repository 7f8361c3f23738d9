"""What Linux tells about a process of ours. Reads only, but for one byte on purpose."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

POOL = "memfd:baton-kv-pool"
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Life:
    """One process: a pid alone may be given to another."""

    pid: int
    started_ticks: int  # since boot


@dataclass(frozen=True, slots=True)
class Sizes:
    rss_bytes: int
    private_bytes: int  # resident and nobody else's: without KV pools, which are shared, and files
    descriptors: int
    threads: int


def life_of(pid: int) -> Life | None:
    """None: there is no such process, or only its exit code is left."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else Life(pid, int(fields[19]))


def is_alive(life: Life) -> bool:
    return life_of(life.pid) == life


def state_of(pid: int) -> str:
    """One letter: R, S, D, T (stopped), …; empty where there is no such process."""
    fields = _stat(pid)
    return "" if fields is None else fields[0]


def sizes_of(pid: int) -> Sizes | None:
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 -- counted each second, for many
        threads = len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208
    except (OSError, ValueError):
        return None
    return Sizes(resident * PAGE_BYTES, (resident - shared) * PAGE_BYTES, descriptors, threads)


def children_of(pid: int) -> list[int]:
    """All processes below it."""
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
    """The addresses of its own KV pool; None without one."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return None
    found = re.search(rf"^([0-9a-f]+)-([0-9a-f]+) rw-s .*{POOL}", maps, re.MULTILINE)
    return range(int(found[1], 16), int(found[2], 16)) if found else None


def read_memory(pid: int, address: int, count: int) -> bytes:
    """Raises: OSError."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(count) or b""


def write_memory(pid: int, address: int, data: bytes) -> None:
    """Through the owner's own map, since no other may write its pool. Raises: OSError."""
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(address)
        memory.write(data)


def _stat(pid: int) -> list[str] | None:
    """Fields from the state on: names of programs may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
