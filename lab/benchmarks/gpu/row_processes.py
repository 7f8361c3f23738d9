"""Processes that measure the rows, and their time limits."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from baton.lab.benchmarks.gpu.processes import DEVICE_LOST, end, signals_held
from baton.launch.paths import ROOT

POLL_S, EXIT_S = 0.05, 20.0
MODULES = {
    "attention": ("decode_attention", "prefill_attention", "pages"),
    "engine": ("throughput", "step_qwen0.6b", "step_llama8b"),
    "workers": ("hand_over", "one_gpu"),
    "peers": ("transformers", "flashinfer"),
}
"""Names of rows by module; a test compares them with the modules."""
PROFILED = "engine"
"""Module with a profiler, which slows down all later launches of its process: each of its rows has a new process."""
ALL_ROWS = tuple(row for rows in MODULES.values() for row in rows)
ROW_S = {"step_llama8b": 60.0, "step_qwen0.6b": 60.0, "throughput": 70.0, "hand_over": 120.0, "one_gpu": 150.0}
ROW_S["transformers"] = 80.0
OTHER_ROW_S = 40.0  # time limit of a row, including process start and compilation
LEAST_S = 10.0  # remaining time below which no row begins

Start = Callable[[Sequence[str]], "subprocess.Popen[bytes]"]
"""Function that starts a process, as a session leader, which measures rows in their order."""


def shared_out(wanted: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the module and rows of each process."""
    for module, rows in MODULES.items():
        chosen = [row for row in rows if row in wanted]
        if module == PROFILED:
            yield from ((module, [row]) for row in chosen)
        elif chosen:
            yield module, chosen


def starting(module: str, out: Path, dry: bool) -> Start:
    def start(rows: Sequence[str]) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-P", "-m", "baton.lab.benchmarks.gpu.run", module, "--rows", ",".join(rows)]
        command += ["--out", str(out), *(["--dry-run"] if dry else [])]
        print(f"== {' '.join(command[3:])}", flush=True)
        return subprocess.Popen(command, cwd=ROOT, start_new_session=True)

    return start


def run_rows(start: Start, rows: Sequence[str], out: Path, deadline: float) -> int:
    """Measure rows in one process, and in a new one after a row that timed out or crashed.

    Writes the reason for each row without a result.
    """
    left = list(rows)
    code = 0
    while left and time.monotonic() < deadline - LEAST_S:
        with ExitStack() as undo:
            with signals_held():
                process = start(left)
                undo.callback(end, process)
            code |= _watch(process, left, out, deadline)
    for row in left:
        _note(out, row, "absent", "no time left")
    return code


def _watch(process: "subprocess.Popen[bytes]", left: list[str], out: Path, deadline: float) -> int:
    """Wait for the rows and remove finished ones from `left`. Return 1 at the first failure or time-out, else 0."""
    while left:
        row = left[0]
        written = out / f"{row}.json"
        latest = min(deadline, time.monotonic() + ROW_S.get(row, OTHER_ROW_S))
        while not written.exists() and process.poll() is None and time.monotonic() < latest:
            time.sleep(POLL_S)
        ended = process.poll()
        if ended == DEVICE_LOST and not written.exists():
            return 1  # the previous row broke the device: `row` has not begun and stays in `left`
        del left[0]
        if not written.exists():
            _note(out, row, "failed", "timed out" if ended is None else f"its process exited with {ended}")
            return 1
    with contextlib.suppress(subprocess.TimeoutExpired):
        return int(process.wait(EXIT_S) != 0)
    return 1


def _note(out: Path, row: str, status: str, reason: str) -> None:
    (out / f"{row}.json").write_text(json.dumps({"row": row, "status": status, "reason": reason}) + "\n")
