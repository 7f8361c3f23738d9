"""The tests of a GPU, in several processes at once where that is right: most of their time goes into compiling kernels.

Those that measure memory or time, or start workers, come after, one process at a time. A process that hangs or dies
takes only its own tests with it.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SHARED = (
    "test_attention_on_gpu.py",
    "test_layer_kernels_on_gpu.py",
    "test_checksum_on_gpu.py",
    "test_engine_on_gpu.py",
)
ALONE = ("test_memory_on_gpu.py", "test_cuda_ipc.py", "test_workers_on_gpu.py", "test_nccl.py")
MOST_PARTS = 10
THREADS = 2  # of a process's arithmetic on the CPU
SHARED_S, EACH_ALONE_S = 150.0, 60.0
NO_TESTS = 5  # pytest's exit code where a part had none to run


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    code: int
    summary: str  # pytest's last line

    def __str__(self) -> str:
        return f"tests {self.name}: {self.summary or f'exit code {self.code}'}"


def run_tests(root: Path, deadline: float) -> list[Outcome]:
    """`deadline`: on the monotonic clock. Prints what failed, and a line for each process."""
    parts = max(1, min(MOST_PARTS, (os.cpu_count() or 1) - 2))
    shared = [(f"shared {part}/{parts}", SHARED, f"{part}/{parts}") for part in range(1, parts + 1)]
    runs = _together(root, shared, min(deadline, time.monotonic() + SHARED_S))
    for file in ALONE:
        runs += _together(root, [(file, (file,), "1/1")], min(deadline, time.monotonic() + EACH_ALONE_S))
    return runs


def _together(root: Path, parts: Sequence[tuple[str, Sequence[str], str]], deadline: float) -> list[Outcome]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        started = [(name, Path(folder) / str(index)) for index, (name, _, _) in enumerate(parts)]
        processes = [_start(root, files, part, log) for (_, files, part), (_, log) in zip(parts, started, strict=True)]
        for process, (name, log) in zip(processes, started, strict=True):
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                code = 124
            found.append(_outcome(name, process.wait() if code != 124 else code, log.read_text(errors="replace")))
    return found


def _start(root: Path, files: Sequence[str], part: str, log: Path) -> "subprocess.Popen[bytes]":
    """Without the project's own settings of pytest, whose plugins may not be here."""
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(root), "--import-mode=importlib"]
    command += ["-p", "no:cacheprovider", "-v", "--tb=short", "-rs", "--part", part]
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, *(f"tests/gpu/{file}" for file in files)],
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": str(THREADS)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _outcome(name: str, code: int, log: str) -> Outcome:
    lines = log.rstrip().splitlines()
    run = Outcome(name, 0 if code == NO_TESTS else code, lines[-1].strip("= ") if lines and code != 124 else "")
    if run.code:
        print(f"== {name}\n" + "\n".join(lines[-60:]), flush=True)
    print(run, flush=True)
    return run
