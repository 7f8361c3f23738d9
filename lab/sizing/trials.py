"""Trials: simulations of a cluster under a load, run by several processes at once, and their figures."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from baton import child_environment
from baton.lab.simulation.campaign import HASH_SEED
from baton.lab.sizing.cluster import CallResult, ClusterShape, SizingCall, run_cluster
from baton.lab.sizing.costs import Overheads, read_costs


@dataclass(frozen=True, slots=True)
class SizingTargets:
    """SLOs: upper bounds of a call's TTFT and mean time between tokens."""

    ttft_ms: float
    tbt_ms: float


@dataclass(frozen=True, slots=True)
class Trial:
    """One cluster under one load. `costs`: the JSON of `baton bench curves`."""

    cluster: ClusterShape
    costs: Mapping[str, Any]
    overheads: Overheads
    calls: tuple[SizingCall, ...]
    targets: SizingTargets
    seed: int

    def to_line(self) -> str:
        calls = [[call.at_s, call.prompt.hex(), call.answer_tokens] for call in self.calls]
        parts = {"cluster": asdict(self.cluster), "overheads": asdict(self.overheads), "targets": asdict(self.targets)}
        return json.dumps({**parts, "costs": self.costs, "calls": calls, "seed": self.seed})

    @staticmethod
    def from_line(line: str) -> "Trial":
        plain = json.loads(line)
        calls = tuple(SizingCall(at_s, bytes.fromhex(prompt), tokens) for at_s, prompt, tokens in plain["calls"])
        cluster, overheads = ClusterShape(**plain["cluster"]), Overheads(**plain["overheads"])
        return Trial(cluster, plain["costs"], overheads, calls, SizingTargets(**plain["targets"]), plain["seed"])


@dataclass(frozen=True, slots=True)
class TrialFigures:
    """Figures of one trial; each share is a fraction of all calls."""

    calls: int
    failed: int  # failed calls, refused ones included
    ttft_p50_ms: float
    ttft_p99_ms: float
    tbt_p50_ms: float  # median gap between two pieces of an answer, over all answers
    tbt_p99_ms: float
    share: float  # fraction of calls within both SLOs
    ttft_share: float  # fraction of calls within the TTFT SLO
    tbt_share: float


def figures_of(answers: Sequence[CallResult], targets: SizingTargets) -> TrialFigures:
    """Compute the figures; a failed call meets no SLO."""
    good = [each for each in answers if not each.error]
    ttfts_ms = [each.ttft_s * 1e3 for each in good]
    gaps_ms = [gap_s * 1e3 for each in good for gap_s in each.gaps_s]
    first = [ms <= targets.ttft_ms for ms in ttfts_ms]
    between = [each.tpot_s * 1e3 <= targets.tbt_ms for each in good]
    count = max(1, len(answers))
    return TrialFigures(
        len(answers),
        len(answers) - len(good),
        *_percentiles(ttfts_ms),
        *_percentiles(gaps_ms),
        share=sum(map(all, zip(first, between, strict=True))) / count,
        ttft_share=sum(first) / count,
        tbt_share=sum(between) / count,
    )


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    """Return p50 and p99; 0 without values."""
    if not values:
        return 0.0, 0.0
    p50, p99 = np.percentile(values, (50, 99))
    return float(p50), float(p99)


def run_trial(trial: Trial, on_done: Callable[[], object] = lambda: None) -> TrialFigures:
    """Run a trial in this process. Raises: CurvesError, RuntimeError."""
    costs = read_costs(trial.costs)
    answers = run_cluster(trial.cluster, costs, trial.overheads, trial.calls, trial.seed, on_done)
    return figures_of(answers, trial.targets)


class TrialFailed(Exception):
    """Error: a process ended before its trial did."""


class Crew:
    """Processes that run trials. `on_done` is called on some thread whenever a simulated call has ended."""

    def __init__(self, jobs: int, on_done: Callable[[], object] = lambda: None) -> None:
        environment = child_environment() | {"PYTHONHASHSEED": HASH_SEED, "OMP_NUM_THREADS": "1"}
        command, pipe = [sys.executable, "-m", "baton.lab.sizing"], subprocess.PIPE
        self._all = [
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
            for _ in range(jobs)
        ]
        self._free: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
        for process in self._all:
            self._free.put(process)
        self._threads = ThreadPoolExecutor(jobs)
        self._on_done = on_done

    def run(self, trials: Sequence[Trial]) -> list[TrialFigures]:
        """Return figures in the order of the trials. Raises: TrialFailed."""
        return list(self._threads.map(self._one, trials))

    def close(self) -> None:
        for process in self._all:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._all:
            process.communicate()  # closes its pipes

    def _one(self, trial: Trial) -> TrialFigures:
        process = self._free.get()
        try:
            figures = self._exchange(process, trial)
        except BrokenPipeError:
            figures = None
        if figures is None:
            said = process.stderr.read().strip().splitlines() if process.stderr is not None else []
            raise TrialFailed(f"the simulation of {trial.cluster} ended early: {said[-1] if said else 'no output'}")
        self._free.put(process)
        return figures

    def _exchange(self, process: "subprocess.Popen[str]", trial: Trial) -> TrialFigures | None:
        """Send a trial to a process and return the figures; None if the process has ended. Raises: BrokenPipeError."""
        if process.stdin is None or process.stdout is None:
            return None
        process.stdin.write(trial.to_line() + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith("{"):
                return TrialFigures(**json.loads(line))
            self._on_done()
        return None


@contextmanager
def crew(jobs: int, on_done: Callable[[], object] = lambda: None) -> Iterator[Crew]:
    made = Crew(jobs, on_done)
    try:
        yield made
    finally:
        made.close()
