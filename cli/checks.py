"""`baton test`: style, types and tests; all of them run whatever the first says."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from cli.paths import ROOT
from cli.second_look import SecondLook, look_again, noting_failures

# Tiny models gain nothing from more threads, and spinning ones take the cores from the processes under test.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
END_TO_END = "tests/e2e"
SEEDS = "150"  # about a minute of a core
BY_FILE = ("--dist", "loadfile", "--no-loadscope-reorder")
TYPED = [
    "router",
    "gateway",
    "prefill_worker",
    "decode_worker",
    "elastic_worker",
    "worker",
    "kvtransfer",
    "kernels",
    "engine",
    "service",
    "structured",
    "client",
    "cli",
    "chaos",
    "simulation",
    "benchmarks",
]


@dataclass(frozen=True, slots=True)
class Check:
    """A module of Python's, with its arguments."""

    name: str
    command: Sequence[str]


@dataclass(frozen=True, slots=True)
class Verdict:
    name: str
    took_s: float
    output: str  # empty where it was shown as it came
    status: int
    failures: Path | None = None  # where pytest has noted which tests failed
    second_look: SecondLook | None = None

    @property
    def passed(self) -> bool:
        return self.status == 0 or (self.second_look is not None and self.second_look.passed)

    def __str__(self) -> str:
        return f"{self.name} {'passed' if self.passed else 'FAILED'} ({self.took_s:.0f} s)"


def all_checks() -> list[list[Check]]:
    """One stage after another; the checks of a stage run at once."""
    cores = str(len(os.sched_getaffinity(0)))
    return [
        [Check("style", ["ruff", "check", "."])],
        [Check("format", ["ruff", "format", "--check", "."])],
        [
            # Has one core's work, and unit tests leave as much idle while they wait.
            Check("types", ["mypy", *TYPED]),
            # A module's tests stay together, for the sake of what they share.
            # In their order: by the number of tests, the longest of all, alone in its file, would come last.
            Check("unit tests", ["pytest", "--numprocesses", cores, *BY_FILE, "--ignore", END_TO_END]),
        ],
        # One at a time: each has processes of its own, and measures how long they take.
        [Check("end to end", ["pytest", END_TO_END, "-m", "not minute"])],
        # A minute each of what runs for long by hand. They bear each other: what they hold is right or wrong, not fast.
        [
            Check("simulation", ["cli", "simulate", "--seeds", SEEDS]),
            Check("long runs", ["pytest", END_TO_END, "-m", "minute", "--numprocesses", "2", *BY_FILE]),
        ],
    ]


def run_checks(pytest_arguments: Sequence[str]) -> int:
    """0 where everything passed, else 1. With arguments for pytest only pytest runs: someone looks for one thing."""
    if pytest_arguments:
        return conclude([run_check(Check("tests", ["pytest", *pytest_arguments]), None)])
    with tempfile.TemporaryDirectory() as scratch:
        verdicts = [verdict for stage in all_checks() for verdict in run_stage(stage, Path(scratch))]
        return conclude([after_second_look(verdict) for verdict in verdicts])


def conclude(verdicts: Sequence[Verdict]) -> int:
    """Says what came out, the unreliable by name; the exit status."""
    failed = [verdict.name for verdict in verdicts if not verdict.passed]
    print("== " + ", ".join(map(str, verdicts)))
    for verdict in verdicts:
        if verdict.second_look is not None:
            print(f"== {verdict.name}: {verdict.second_look}")
    print(f"== {'FAILED: ' + ', '.join(failed) if failed else 'all passed'}", flush=True)
    return 1 if failed else 0


def after_second_look(verdict: Verdict) -> Verdict:
    if verdict.failures is None or verdict.passed:
        return verdict
    return replace(verdict, second_look=look_again(verdict.failures, verdict.status, ONE_THREAD))


def run_stage(checks: Sequence[Check], scratch: Path) -> list[Verdict]:
    """The last one's output is shown as it comes, that of the others after it."""
    for check in checks:
        print(f"== {check.name}: {' '.join(check.command)}", flush=True)
    *aside, shown = checks
    with ThreadPoolExecutor(len(checks)) as threads:
        others = [threads.submit(run_check, check, subprocess.PIPE, scratch) for check in aside]
        last = run_check(shown, None, scratch)
        verdicts = [other.result() for other in others]
    for verdict in verdicts:
        print(f"== {verdict.name}:\n{verdict.output}", flush=True)
    return [*verdicts, last]


def run_check(check: Check, output: int | None, scratch: Path | None = None) -> Verdict:
    """`output` as subprocess takes it. In `scratch` pytest notes which tests failed."""
    start = time.monotonic()
    failures = scratch / check.name if scratch is not None and check.command[0] == "pytest" else None
    command = [sys.executable, "-m", *check.command, *(noting_failures(failures) if failures is not None else [])]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=ONE_THREAD,
        check=False,
        text=True,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
    )
    return Verdict(check.name, time.monotonic() - start, done.stdout or "", done.returncode, failures)
