"""Memory of the machine, or of the control groups that limit this process (Linux only)."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")


class GroupMemory(NamedTuple):
    """A control group's memory, in bytes."""

    limit: int
    used: int  # used memory without reclaimable file pages


def total_bytes(root: Path = ROOT) -> int:
    """Return the maximum memory of this process in bytes. `root`: root of the file system with /proc and /sys."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(group.limit for group in _groups(root))])


def available_bytes(root: Path = ROOT) -> int:
    """Return the memory in bytes that the kernel estimates to be available without swapping."""
    try:
        lines = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        machine = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        machine = total_bytes(root)
    return max(0, min([machine, *(group.limit - group.used for group in _groups(root))]))


def _groups(root: Path) -> Iterator[GroupMemory]:
    """Yield the control groups with a memory limit, from this process's own to the topmost visible one."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = top / path.lstrip("/")
        for folder in (each for each in (own, *own.parents) if each.is_relative_to(top)):
            found = _group(folder, *names)
            if found is not None:
                yield found


def _group(folder: Path, limit: str, used: str, droppable: str) -> GroupMemory | None:
    """Return a group's memory; None without a limit ("max") or if it is not visible in this container."""
    try:
        bound = int((folder / limit).read_text())
        stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
        return GroupMemory(bound, int((folder / used).read_text()) - int(stat.get(droppable, 0)))
    except (OSError, ValueError):
        return None


def shortage(amounts: Mapping[str, int], total: int) -> str:
    """Return an error if the sum of `amounts`, bytes by name, exceeds `total`; empty if they fit.

    The error states the maximum for the largest of the amounts.
    """
    needed, largest = sum(amounts.values()), max(amounts, key=lambda name: amounts[name])
    if needed <= total:
        return ""
    parts = " and ".join(f"{name} of {_gib(size)}" for name, size in amounts.items() if size)
    left = total - needed + amounts[largest]
    remedy = f"{largest} may be {_gib(left)} at most" if left > 0 else "take a smaller model or fewer workers"
    return f"{parts} do not fit into the {_gib(total)} of memory here; {remedy}"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.4g} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.4g} MiB"
