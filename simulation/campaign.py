"""Many seeds at once, on as many processes as there are cores to spare; reports its progress."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from simulation.tally import Tally

ROOT = Path(__file__).parents[1]
HASH_SEED = "0"
"""Sets are gone through in the order of hashes: the same seed would not be the same run otherwise."""


@dataclass(frozen=True, slots=True)
class Campaign:
    first: int
    seeds: int
    jobs: int
    requests: int
    faults: int | None
    plant: str | None
    trace: bool = False
    go_on: bool = False

    def command(self, job: int) -> list[str]:
        """Of one process, which has every so many-th seed."""
        count = len(range(job, self.seeds, self.jobs))
        flags = ["--first", str(self.first + job), "--count", str(count), "--stride", str(self.jobs)]
        flags += ["--requests", str(self.requests)]
        flags += ["--faults", str(self.faults)] if self.faults is not None else []
        flags += ["--plant", self.plant] if self.plant is not None else []
        flags += ["--trace"] if self.trace else []
        flags += ["--go-on"] if self.go_on else []
        return [sys.executable, "-m", "simulation", *flags]


@dataclass(frozen=True, slots=True)
class Found:
    """A seed in which an invariant did not hold."""

    seed: int
    violation: str
    faults: tuple[str, ...]
    last: tuple[str, ...]  # events


Told = Tally | Found | str


def run(campaign: Campaign) -> Generator[Told, None, None]:
    """The reports of the processes, as they come; a text is an event. Ends with them; closing it ends them."""
    environment = os.environ | {"PYTHONHASHSEED": HASH_SEED, "OMP_NUM_THREADS": "1"}
    jobs = [job for job in range(campaign.jobs) if job < campaign.seeds]
    processes = [
        subprocess.Popen(campaign.command(job), stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        for job in jobs
    ]
    told: SimpleQueue[str | None] = SimpleQueue()
    for process in processes:
        Thread(target=_read, args=(process, told), daemon=True).start()
    try:
        ended = 0
        while ended < len(processes):
            line = told.get()
            if line is None:
                ended += 1
            else:
                yield _told(json.loads(line))
        failed = [code for process in processes if (code := process.wait()) not in (0, 1)]
        if failed:
            raise RuntimeError(f"a process of the simulation ended with {', '.join(map(str, failed))}")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _read(process: "subprocess.Popen[str]", told: "SimpleQueue[str | None]") -> None:
    if process.stdout is not None:
        for line in process.stdout:
            told.put(line)
    told.put(None)


def _told(plain: dict[str, Any]) -> Told:
    if "event" in plain:
        return str(plain["event"])
    if "tally" in plain:
        return Tally.from_plain(plain["tally"])
    return Found(plain["seed"], plain["violation"], tuple(plain["faults"]), tuple(plain["last"]))


class Clock:
    """How fast it goes. Real time."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s
