"""Stages of `baton test`, and the report on skipped tests."""

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from baton.launch.paths import ROOT

HARDWARE_REASONS = frozenset({"needs a GPU", "needs two GPUs", "needs a processor with AVX-512"})


def noting_skips(report: Path) -> list[str]:
    """Return pytest arguments that write the report which `read_skips` reads."""
    return [f"--junit-xml={report}"]


def read_skips(report: Path) -> Counter[str]:
    """Count skipped tests by reason; empty if pytest wrote no report."""
    if not report.exists():
        return Counter()
    skipped = ElementTree.parse(report).iter("skipped")
    return Counter(each.get("message", "") for each in skipped if each.get("type") == "pytest.skip")


def avoidable(skips: Mapping[str, int]) -> list[str]:
    """Return the skip reasons that are not missing hardware."""
    return sorted(skips.keys() - HARDWARE_REASONS)


def summary(skips: Mapping[str, int]) -> str:
    """Format skipped tests as one line, the most frequent reason first."""
    by_number = sorted(skips.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{number} ({reason})" for reason, number in by_number) or "none"


# One thread: tiny models gain nothing from more, and spinning threads take cores from the processes under test.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
# Container images often set this variable: each of some hundred processes would compile every module again.
ONE_THREAD.pop("PYTHONDONTWRITEBYTECODE", None)
END_TO_END = "tests/e2e"
LONG = (
    "tests/kernels/test_native_bounds.py",
    "tests/kernels/triton/test_triton_interpreted.py",
    "tests/lab/protocol",
    "tests/lab/simulation",
)
"""Unit tests that compute for long: they use the time for which the end-to-end tests leave cores idle."""
WITHOUT_LONG = tuple(f"--ignore={path}" for path in (END_TO_END, *LONG))
SEEDS = "100"  # number of simulated seeds: about 40 s on one core
SLOWEST = "--durations=15"
LOWEST_PRIORITY = ("nice", "-n", "19")
# Keeps the order of files. Otherwise xdist would run the longest test last, since it is alone in its file.
BY_FILE = ("--dist", "loadfile", "--no-loadscope-reorder")
# tests/e2e/conftest.py defines the groups.
TWO_AT_ONCE = ("--numprocesses", "2", "--dist", "loadgroup", "--no-loadscope-reorder")


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a stage. `command`: Python module to run, with its arguments."""

    name: str
    command: Sequence[str]


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    name: str
    took_s: float
    output: str  # empty if it was printed while the check ran
    status: int
    skips: Counter[str] = field(default_factory=Counter)  # skipped tests by reason

    @property
    def passed(self) -> bool:
        return self.status == 0

    def __str__(self) -> str:
        return f"{self.name} {'passed' if self.passed else 'FAILED'} ({self.took_s:.0f} s)"


def all_checks() -> list[list[Check]]:
    """Return the stages, which run one after another. The checks of a stage run in parallel, and the last one goes
    first where cores are short.
    """
    cores = len(os.sched_getaffinity(0))
    return [
        [Check("style", ["ruff", "check", "."])],
        [Check("format", ["ruff", "format", "--check", "."])],
        # Collection compiles all modules once, so that the many processes of the tests need not.
        [Check("collection", ["pytest", "--collect-only", "-q"]), Check("types", ["mypy", "-p", "baton"])],
        # Unit tests get one process more than cores, since they leave cores idle while they wait.
        [Check("unit tests", ["pytest", "--numprocesses", str(cores + 1), *BY_FILE, SLOWEST, *WITHOUT_LONG])],
        [
            Check("simulation", ["baton.cli", "simulate", "--seeds", SEEDS]),
            Check("long unit tests", ["pytest", *LONG, "--numprocesses", "2", *BY_FILE, SLOWEST]),
            Check("end to end", ["pytest", END_TO_END, "-m", "not alone", *TWO_AT_ONCE, SLOWEST]),
        ],
        [Check("end to end alone", ["pytest", END_TO_END, "-m", "alone"])],
    ]


def run_checks(pytest_arguments: Sequence[str], no_skips: bool = False) -> int:
    """Run all checks, or only pytest if it has arguments; return 0 if everything passed, else 1.

    `no_skips`: fail if a test was skipped for another reason than missing hardware.
    """
    stages = [[Check("tests", ["pytest", *pytest_arguments])]] if pytest_arguments else all_checks()
    with tempfile.TemporaryDirectory() as scratch:
        return conclude([verdict for stage in stages for verdict in run_stage(stage, Path(scratch))], no_skips)


def conclude(verdicts: Sequence[CheckVerdict], no_skips: bool = False) -> int:
    """Print results and skipped tests by reason; return the exit status."""
    failed = [verdict.name for verdict in verdicts if not verdict.passed]
    skips = sum((verdict.skips for verdict in verdicts), Counter[str]())
    if no_skips and avoidable(skips):
        failed.append(f"skipped ({', '.join(avoidable(skips))})")
    print("== " + ", ".join(map(str, verdicts)))
    print(f"== skipped tests: {summary(skips)}")
    print(f"== {'FAILED: ' + ', '.join(failed) if failed else 'all passed'}", flush=True)
    return 1 if failed else 0


def run_stage(checks: Sequence[Check], scratch: Path) -> list[CheckVerdict]:
    """Run the last check and show its output. In parallel, run the other checks at the lowest priority.

    At the end, print the last line of output of each of the other checks, or the complete output if the check failed.
    """
    for check in checks:
        print(f"== {check.name}: {' '.join(check.command)}", flush=True)
    *aside, shown = checks
    with ThreadPoolExecutor(len(checks)) as threads:
        others = [threads.submit(run_check, check, subprocess.PIPE, scratch) for check in aside]
        last = run_check(shown, None, scratch)
        verdicts = [other.result() for other in others]
    for verdict in verdicts:
        text = verdict.output.rstrip().rpartition("\n")[2] if verdict.passed else verdict.output
        print(f"== {verdict.name}:\n{text}", flush=True)
    return [*verdicts, last]


def run_check(check: Check, output: int | None, scratch: Path) -> CheckVerdict:
    """Run one check. `output`: stdout argument of subprocess; with one, the check has the lowest priority. `scratch`:
    folder for pytest's report.
    """
    start = time.monotonic()
    report = scratch / f"{check.name}.xml"
    noted = noting_skips(report) if check.command[0] == "pytest" else []
    done = subprocess.run(
        [*(LOWEST_PRIORITY if output else ()), sys.executable, "-m", *check.command, *noted],
        cwd=ROOT,
        env=ONE_THREAD,
        check=False,
        text=True,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
    )
    return CheckVerdict(check.name, time.monotonic() - start, done.stdout or "", done.returncode, read_skips(report))
