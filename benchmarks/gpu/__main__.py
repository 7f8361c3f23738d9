"""All tests of the GPU and all rows of the table: `benchmarks/gpu.sh`.

    .venv/bin/python -m baton.benchmarks.gpu [--rows NAME,NAME] [--no-tests] [--out FOLDER] [--dry-run]

Each row is written to FOLDER/ROW.json when it is done; the table comes last. A row that takes too long is ended and
costs no other. Exit status 1 where a test or a row failed; a target that is missed is no failure.

Tests run in several processes at once where that is right: most of their time goes into compiling kernels. Those that
measure memory or time, or start workers, come after, one process at a time. A process that hangs or dies takes only its
own tests with it.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.benchmarks.gpu.row import DEVICE_LOST
from baton.launch.paths import ROOT

SHARED = (
    "test_attention_on_gpu.py",
    "test_delta_on_gpu.py",
    "test_layer_kernels_on_gpu.py",
    "test_checksum_on_gpu.py",
    "test_engine_on_gpu.py",
)
ALONE = ("test_memory_on_gpu.py", "test_cuda_ipc.py", "test_workers_on_gpu.py", "test_nccl.py")
MOST_PARTS = 10
THREADS = 2  # of a process's arithmetic on the CPU
SHARED_S, EACH_ALONE_S = 150.0, 60.0
ALONE_S = {"test_workers_on_gpu.py": 150.0}  # starts processes, and each compiles
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
        runs += _together(
            root, [(file, (file,), "1/1")], min(deadline, time.monotonic() + ALONE_S.get(file, EACH_ALONE_S))
        )
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
                code = 124
            _end(process)
            found.append(_outcome(name, code, log.read_text(errors="replace")))
    return found


def _start(root: Path, files: Sequence[str], part: str, log: Path) -> "subprocess.Popen[bytes]":
    """Without the project's own settings of pytest, whose plugins may not be here."""
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(root), "--import-mode=importlib"]
    command += ["-p", "no:cacheprovider", "-v", "--tb=short", "-rs", "--part", part]
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, *(f"tests/gpu/{file}" for file in files)],
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": str(THREADS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # workers that a test has started end with it
        )


def _outcome(name: str, code: int, log: str) -> Outcome:
    lines = log.rstrip().splitlines()
    run = Outcome(name, 0 if code == NO_TESTS else code, lines[-1].strip("= ") if lines and code != 124 else "")
    if run.code:
        print(f"== {name}\n" + "\n".join(lines[-60:]), flush=True)
    print(run, flush=True)
    return run


POLL_S, EXIT_S = 0.05, 20.0
MODULES = {
    "attention": ("decode_attention", "prefill_attention", "pages"),
    "engine": ("step_llama8b", "step_qwen0.6b", "throughput"),
    "workers": ("hand_over", "one_gpu"),
    "peers": ("transformers", "flashinfer"),
}
"""Names of rows by module; a test holds them equal to what the modules have."""
ALL_ROWS = tuple(row for rows in MODULES.values() for row in rows)
ROW_S = {"step_llama8b": 70.0, "step_qwen0.6b": 70.0, "throughput": 75.0, "hand_over": 75.0, "one_gpu": 90.0}
ROW_S["transformers"] = 100.0
OTHER_ROW_S = 50.0  # that a row may take, its process's start and kernels that are compiled first included
TOTAL_S = 540.0  # of everything: rows that would begin later do not. Processes that end, and the table, come on top
LEAST_S = 10.0  # with less than that left a row does not begin
WIDTHS = (18, 26, 12, 17, 26, 5)


Start = Callable[[Sequence[str]], "subprocess.Popen[bytes]"]
"""Begins to measure rows, in their order, in a session of its own."""


def starting(module: str, out: Path, dry: bool) -> Start:
    def start(rows: Sequence[str]) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-P", "-m", "baton.benchmarks.gpu.run", module, "--rows", ",".join(rows)]
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
        process = start(left)
        try:
            code |= _watch(process, left, out, deadline)
        finally:
            _end(process)
    for row in left:
        _note(out, row, "absent", "no time was left for it")
    return code


def _watch(process: "subprocess.Popen[bytes]", left: list[str], out: Path, deadline: float) -> int:
    """Until it ends, or a row has used up its time. Takes from `left` the rows that have ended."""
    while left:
        row = left[0]
        written = out / f"{row}.json"
        end = min(deadline, time.monotonic() + ROW_S.get(row, OTHER_ROW_S))
        while not written.exists() and process.poll() is None and time.monotonic() < end:
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


def _end(process: "subprocess.Popen[bytes]") -> None:
    """With whatever it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _note(out: Path, row: str, status: str, reason: str) -> None:
    (out / f"{row}.json").write_text(json.dumps({"row": row, "status": status, "reason": reason}) + "\n")


def table(out: Path, rows: Sequence[str]) -> str:
    lines = [_line("row", "figure", "value", "unit", "target", "met", "limit in the same run")]
    for row in rows:
        path = out / f"{row}.json"
        if not path.exists():
            lines.append(f"{row:{WIDTHS[0]}}did not end")
            continue
        found: dict[str, Any] = json.loads(path.read_text())
        if found["status"] != "measured":
            lines.append(f"{row:{WIDTHS[0]}}{found['status']}: {found['reason']}")
        for figure in found.get("figures", ()):
            met = {True: "yes", False: "NO", None: ""}[figure["met"]]
            value, unit = f"{figure['value']:.4g}", figure["unit"]
            lines.append(_line(row, figure["name"], value, unit, figure["target"], met, figure["limit"]))
    return "\n".join(lines)


def _line(*columns: str) -> str:
    *narrow, last = columns
    return "".join(f"{text:{width}}" for text, width in zip(narrow, WIDTHS, strict=True)) + last


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ALL_ROWS), help="names with commas between them")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "runtime" / "gpu")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, at sizes of nothing: whether it all runs")
    options = parser.parse_args(arguments)
    wanted = options.rows.split(",")
    if unknown := set(wanted) - set(ALL_ROWS):
        parser.error(f"no row is called {', '.join(sorted(unknown))}; there are {', '.join(ALL_ROWS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for row in wanted:
        (options.out / f"{row}.json").unlink(missing_ok=True)
    started = time.monotonic()
    deadline = started + TOTAL_S
    tests = [] if options.no_tests else run_tests(ROOT, deadline)
    codes = [test.code for test in tests]
    for module, rows in MODULES.items():
        if chosen := [row for row in rows if row in wanted]:
            start = starting(module, options.out, options.dry_run)
            codes.append(run_rows(start, chosen, options.out, deadline))
    print("", *tests, table(options.out, wanted), sep="\n")
    print(f"{time.monotonic() - started:.0f} s in all", flush=True)
    if options.dry_run:
        print("a dry run: no figure above says anything about anything", flush=True)
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
