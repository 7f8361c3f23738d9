"""Memory of a service's processes over time: what each of them holds for itself, without the shared pools of KV."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Self

_MIB = 1024  # /proc counts in KiB


def own_mib(pid: int, proc: Path = Path("/proc")) -> float | None:
    """Anonymous memory of a process; None where it is gone."""
    try:
        lines = (proc / str(pid) / "status").read_text().splitlines()
    except OSError:
        return None
    counted = next((line for line in lines if line.startswith("RssAnon:")), None)
    return float(counted.split()[1]) / _MIB if counted is not None else None


def children(pid: int, proc: Path = Path("/proc")) -> dict[str, int]:
    """Process ids below one, by the module that each runs; of two of a kind the second is `NAME 2`."""
    found: dict[str, int] = {}
    for entry in sorted((entry for entry in proc.iterdir() if entry.name.isdigit()), key=lambda each: int(each.name)):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if parent == pid:
            kind = (
                command[command.index("-m") + 1].removeprefix("baton.")
                if "-m" in command[:-1]
                else command[0].partition(" ")[0].rpartition("/")[2]
            )
            same = sum(name.partition(" ")[0] == kind for name in found)
            found[kind if not same else f"{kind} {same + 1}"] = int(entry.name)
    return found


@dataclass
class MemoryWatch:
    """Within it all processes are looked at every `every_s`."""

    pids: Mapping[str, int]
    every_s: float
    samples: dict[str, list[float]] = field(default_factory=dict)
    at_s: list[float] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="memory watch")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        began_s = time.monotonic()
        while True:
            self.at_s.append(round(time.monotonic() - began_s, 1))
            for name, pid in self.pids.items():
                if (mib := own_mib(pid)) is not None:
                    self.samples.setdefault(name, []).append(round(mib, 1))
            if self._ended.wait(self.every_s):
                return


def growth_mib(samples: list[float]) -> float:
    """What the last quarter holds beyond the second one: the first is for what fills up once."""
    quarter = len(samples) // 4
    if not quarter:
        return 0.0
    return median(samples[-quarter:]) - median(samples[quarter : 2 * quarter])
