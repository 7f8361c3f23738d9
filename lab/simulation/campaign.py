"""Run many seeds in several processes, and collect their results."""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field, fields
from queue import SimpleQueue
from threading import Thread
from typing import Any

from baton import child_environment
from baton.lab.simulation.client import RequestEnding, SimulatedHistory
from baton.lab.simulation.world import WorldResult


@dataclass(slots=True)
class Tally:
    """Counters over all seeds without a violation."""

    seeds: int = 0
    requests: int = 0
    faults: int = 0
    resumed: int = 0  # number of Resume calls from clients
    virtual_s: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)  # number of requests by result
    kinds: Counter[str] = field(default_factory=Counter)  # number of faults by kind
    exercised: Counter[str] = field(default_factory=Counter)  # number of events by description

    def add(self, result: WorldResult) -> None:
        kinds = Counter(fault.kind.name.lower() for fault in result.faults)
        ends = Counter(map(_end_of, result.histories))
        requests, faults = len(result.histories), len(result.faults)
        self.merge(Tally(1, requests, faults, result.resumed, result.virtual_s, ends, kinds, result.exercised))

    def merge(self, other: "Tally") -> None:
        for each in fields(self):
            own, others = getattr(self, each.name), getattr(other, each.name)
            if isinstance(own, Counter):
                own.update(others)
            else:
                setattr(self, each.name, own + others)

    def to_plain(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> "Tally":
        fields: dict[str, Any] = {
            name: Counter(each) if isinstance(each, dict) else each for name, each in plain.items()
        }
        return Tally(**fields)

    def lines(self) -> list[str]:
        """Return the counters as lines of text."""
        ends = ", ".join(f"{count:,} {name}" for name, count in self.ends.most_common())
        kinds = ", ".join(f"{count:,} {name}" for name, count in self.kinds.most_common())
        return [
            f"{self.seeds:,} seeds, {self.requests:,} requests, {self.faults:,} faults, "
            f"{self.virtual_s / 3600:,.1f} hours of virtual time",
            f"requests: {ends}",
            f"streams resumed by clients: {self.resumed:,}",
            f"faults: {kinds}",
            "exercised:",
            *(f"{count:12,}  {what}" for what, count in sorted(self.exercised.items())),
        ]


def _end_of(history: SimulatedHistory) -> str:
    end = history.end.name.lower() if history.end is not None else "never"
    return f"{end}: {history.cause}" if history.end is RequestEnding.FAILED else end


HASH_SEED = "0"
"""PYTHONHASHSEED of the processes: sets iterate in the order of hashes, which a seed must repeat."""


@dataclass(frozen=True, slots=True)
class SeedCampaign:
    first: int
    seeds: int
    jobs: int
    requests: int
    faults: int | None
    plant: str | None
    trace: bool = False
    go_on: bool = False

    def command(self, job: int) -> list[str]:
        """Return the command of one process, which runs every `jobs`-th seed."""
        count = len(range(job, self.seeds, self.jobs))
        flags = ["--first", str(self.first + job), "--count", str(count), "--stride", str(self.jobs)]
        flags += ["--requests", str(self.requests)]
        flags += ["--faults", str(self.faults)] if self.faults is not None else []
        flags += ["--plant", self.plant] if self.plant is not None else []
        flags += ["--trace"] if self.trace else []
        flags += ["--go-on"] if self.go_on else []
        return [sys.executable, "-m", "baton.lab.simulation", *flags]


@dataclass(frozen=True, slots=True)
class FoundViolation:
    """Seed with a violated invariant or a refused event."""

    seed: int
    violation: str
    faults: tuple[str, ...]
    last: tuple[str, ...]  # last events before the violation


Report = Tally | FoundViolation | str


def run(campaign: SeedCampaign) -> Generator[Report, None, None]:
    """Yield the reports of all processes as they arrive; a string is a traced event. Closing the iterator ends them."""
    environment = child_environment() | {"PYTHONHASHSEED": HASH_SEED, "OMP_NUM_THREADS": "1"}
    jobs = [job for job in range(campaign.jobs) if job < campaign.seeds]
    processes = [
        subprocess.Popen(campaign.command(job), stdout=subprocess.PIPE, text=True, env=environment) for job in jobs
    ]
    lines: SimpleQueue[str | None] = SimpleQueue()
    for process in processes:
        Thread(target=_read, args=(process, lines), daemon=True).start()
    try:
        ended = 0
        while ended < len(processes):
            line = lines.get()
            if line is None:
                ended += 1
            else:
                yield _report_of(json.loads(line))
        failed = [code for process in processes if (code := process.wait()) not in (0, 1)]
        if failed:
            raise RuntimeError(f"simulation processes failed with exit codes {', '.join(map(str, failed))}")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _read(process: "subprocess.Popen[str]", lines: "SimpleQueue[str | None]") -> None:
    if process.stdout is not None:
        for line in process.stdout:
            lines.put(line)
    lines.put(None)


def _report_of(plain: dict[str, Any]) -> Report:
    if "event" in plain:
        return str(plain["event"])
    if "tally" in plain:
        return Tally.from_plain(plain["tally"])
    return FoundViolation(plain["seed"], plain["violation"], tuple(plain["faults"]), tuple(plain["last"]))


class Clock:
    """Wall-clock time since a campaign began."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s
