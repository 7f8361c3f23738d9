"""Rows in processes of their own: which ones share one, and how long each may take."""

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
"""Names of rows by module; a test holds them equal to what the modules have."""
PROFILED = "engine"
"""Row with a profiler: once a process was profiled its launches stay slower, so each of these rows has a new
process.
"""
ALL_ROWS = tuple(row for rows in MODULES.values() for row in rows)
ROW_S = {"step_llama8b": 60.0, "step_qwen0.6b": 60.0, "throughput": 70.0, "hand_over": 120.0, "one_gpu": 150.0}
ROW_S["transformers"] = 80.0
OTHER_ROW_S = 40.0  # that a row may take, its process's start and kernels that are compiled first included
LEAST_S = 10.0  # with less than that left a row does not begin

Start = Callable[[Sequence[str]], "subprocess.Popen[bytes]"]
"""Begins to measure rows, in their order, in a session of its own."""


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
    """A process for all of the rows; after one that has used up its time, or died of it, another for those behind it.

    What none of them wrote is written here: why.
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
        _note(out, row, "absent", "no time was left for it")
    return code


def _watch(process: "subprocess.Popen[bytes]", left: list[str], out: Path, deadline: float) -> int:
    """Wait until the process ends or a row has used up its time, and remove finished rows from `left`."""
    while left:
        row = left[0]
        written = out / f"{row}.json"
        latest = min(deadline, time.monotonic() + ROW_S.get(row, OTHER_ROW_S))
        while not written.exists() and process.poll() is None and time.monotonic() < latest:
            time.sleep(POLL_S)
        ended = process.poll()
        if ended == DEVICE_LOST and not written.exists():
            return 1  # the row before broke the device for this process; this one has not begun
        del left[0]
        if not written.exists():
            _note(out, row, "failed", "took too long" if ended is None else f"its process ended with {ended}")
            return 1
    with contextlib.suppress(subprocess.TimeoutExpired):
        return int(process.wait(EXIT_S) != 0)
    return 1


def _note(out: Path, row: str, status: str, reason: str) -> None:
    (out / f"{row}.json").write_text(json.dumps({"row": row, "status": status, "reason": reason}) + "\n")
