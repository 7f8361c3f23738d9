"""GPU tests in two groups: first those that mostly compile, in parallel processes; then others, one process at a time.

The second group measures memory or time, or starts workers. After a test that kills its process or breaks the device,
the remaining tests run in a new process.
"""

import os
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton.lab.benchmarks.gpu.processes import end, signals_held

SHARED = (
    "test_attention_on_gpu.py",
    "test_delta_on_gpu.py",
    "test_layer_kernels_on_gpu.py",
    "test_checksum_on_gpu.py",
    "test_engine_on_gpu.py",
)
ALONE = ("test_memory_on_gpu.py", "test_cuda_ipc.py", "test_workers_on_gpu.py", "test_nccl.py")
ALL_FILES = (*SHARED, *ALONE)
MOST_PARTS = 10
THREADS = 2  # CPU threads of a process
SHARED_S, EACH_ALONE_S = 150.0, 60.0
ALONE_S = {"test_workers_on_gpu.py": 150.0}  # the test starts workers, and each compiles its kernels
TEST_SHARE = 0.7  # largest fraction of a process's time limit that one test may take
LINES = 60  # lines printed from the end of a failed process's log
NO_TESTS, TIMED_OUT = 5, 124  # exit codes: pytest found no tests; a process of ours timed out
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class TestOutcome:
    name: str
    code: int
    summary: str  # last line of pytest's output, or the tests that ended its processes

    def __str__(self) -> str:
        return f"tests {self.name}: {self.summary or f'exit code {self.code}'}"


@dataclass(slots=True)
class SuitePart:
    """One of several parts of the tests in some files, run by one process at a time."""

    name: str
    files: Sequence[str]
    share: str  # I/N: part I of N
    log: Path
    limit_s: float
    codes: list[int] = field(default_factory=list)
    ended_by: list[str] = field(default_factory=list)  # tests during which a process ended

    @property
    def running(self) -> Path:
        """File with the name of the running test, followed by its stack if it timed out."""
        return self.log.with_suffix(".running")

    def has_ended(self, code: int) -> bool:
        """Return whether this part is finished. False if a test ended the process and a new one must run the others."""
        self.codes.append(code)
        if not self.running.exists():
            return True
        test, _, rest = self.running.read_text(errors="replace").partition("\n")
        self.running.unlink()
        self.ended_by.append(test)
        with self.log.open("a") as log:
            log.write(f"\n== the process ended in {test}\n{rest}\n")
        return code == TIMED_OUT

    def outcome(self) -> TestOutcome:
        lines = self.log.read_text(errors="replace").rstrip().splitlines()
        code = next((code for code in self.codes if code not in (0, NO_TESTS)), 0)
        said = [lines[-1].strip("= ")] if lines and not self.ended_by else []
        run = TestOutcome(self.name, code, "; ".join([*said, *(f"ended by {test}" for test in self.ended_by)]))
        if code:
            print(f"== {self.name}, the end of {self.log.name}\n" + "\n".join(lines[-LINES:]), flush=True)
        print(run, flush=True)
        return run


def run_tests(root: Path, files: Collection[str], out: Path, deadline: float) -> list[TestOutcome]:
    """Run tests until `deadline` (monotonic). Leaves `out`/tests-N.txt; prints failures, and a line for each
    process.
    """
    for old in out.glob("tests-*"):
        old.unlink()
    parts = max(1, min(MOST_PARTS, (os.cpu_count() or 1) - 2))
    shared = [file for file in SHARED if file in files]
    rounds = [[(f"shared {part}/{parts}", shared, f"{part}/{parts}") for part in range(1, parts + 1)]] if shared else []
    rounds += [[(file, [file], "1/1")] for file in ALONE if file in files]
    found: list[TestOutcome] = []
    number = 0
    for each in rounds:
        made = []
        for name, own, share in each:
            number += 1
            limit_s = ALONE_S.get(name, EACH_ALONE_S) if own != shared else SHARED_S
            made.append(SuitePart(name, own, share, out / f"tests-{number}.txt", limit_s))
        found += _together(root, made, deadline)
    return found


def _together(root: Path, parts: Iterable[SuitePart], deadline: float) -> list[TestOutcome]:
    running: dict[str, tuple[SuitePart, subprocess.Popen[bytes]]] = {}
    found, started = [], time.monotonic()
    try:
        with signals_held():
            running |= {part.name: (part, start(root, part)) for part in parts}
        while running:
            for part, process in list(running.values()):
                is_late = time.monotonic() > min(deadline, started + part.limit_s)
                code = TIMED_OUT if is_late else process.poll()
                if code is None:
                    continue
                end(process)
                if part.has_ended(code):
                    del running[part.name]
                    found.append(part.outcome())
                else:
                    with signals_held():
                        running[part.name] = (part, start(root, part))
            time.sleep(POLL_S)
    finally:
        for _, process in running.values():
            end(process)
    return found


def start(root: Path, part: SuitePart) -> "subprocess.Popen[bytes]":
    """Start pytest without the project's settings, whose plugins may be missing here."""
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(root), "--import-mode=importlib"]
    command += ["-p", "no:cacheprovider", "-v", "--tb=short", "-rfEs", "--part", part.share]
    command += ["--running", str(part.running), "--most-seconds", str(TEST_SHARE * part.limit_s)]
    command += ["--after", part.ended_by[-1]] if part.ended_by else []
    with part.log.open("ab") as output:
        return subprocess.Popen(
            [*command, *(f"tests/gpu/{file}" for file in part.files)],
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": str(THREADS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # one kill of the session also ends workers that a test started
        )
