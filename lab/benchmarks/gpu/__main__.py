"""Run all GPU tests and all rows of the table: `lab/benchmarks/gpu.sh`.

    .venv/bin/python -m baton.lab.benchmarks.gpu [--tests FILE,FILE | --no-tests] [--rows NAME,NAME | --no-rows]
                                             [--out FOLDER] [--dry-run]

Each row is written to FOLDER/ROW.json when it is measured, the output of tests to FOLDER/tests-N.txt; the table is
printed last, even after a signal. A row that times out is killed without effect on others. Exit status 1 if a test or a
row failed; a missed target is no failure.
"""

import argparse
import json
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from baton.lab.benchmarks.gpu.processes import end_by_signals
from baton.lab.benchmarks.gpu.row_processes import ALL_ROWS, run_rows, shared_out, starting
from baton.lab.benchmarks.gpu.suite import ALL_FILES, TestOutcome, run_tests
from baton.launch.paths import ROOT

TOTAL_S = 540.0  # time after which no row begins
WIDTHS = (18, 26, 12, 17, 28, 5)


def table(out: Path, rows: Sequence[str]) -> str:
    lines = [_line("row", "figure", "value", "unit", "target", "met", "limit in the same run")]
    for row in rows:
        path = out / f"{row}.json"
        if not path.exists():
            lines.append(f"{row:{WIDTHS[0]}}did not finish")
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


def measure(files: Collection[str], rows: Collection[str], out: Path, dry: bool) -> int:
    out.mkdir(parents=True, exist_ok=True)
    for row in rows:
        (out / f"{row}.json").unlink(missing_ok=True)
    started = time.monotonic()
    deadline = started + TOTAL_S
    tests: list[TestOutcome] = []
    codes = []
    try:
        tests += run_tests(ROOT, files, out, deadline)
        for module, own in shared_out(rows):
            codes.append(run_rows(starting(module, out, dry), own, out, deadline))
    finally:
        print("", *tests, table(out, [row for row in ALL_ROWS if row in rows]), sep="\n")
        print(f"{time.monotonic() - started:.0f} s in all", flush=True)
        if dry:
            print("dry run: the figures above are meaningless", flush=True)
    return 1 if any(codes) or any(test.code for test in tests) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", default=",".join(ALL_FILES), help="files of tests/gpu, separated by commas")
    parser.add_argument("--no-tests", dest="tests", action="store_const", const="")
    parser.add_argument("--rows", default=",".join(ALL_ROWS), help="names of rows, separated by commas")
    parser.add_argument("--no-rows", dest="rows", action="store_const", const="")
    parser.add_argument("--out", type=Path, default=ROOT / "runtime" / "gpu")
    parser.add_argument("--dry-run", action="store_true", help="run everything on a CPU at tiny sizes")
    options = parser.parse_args(arguments)
    chosen = []
    for kind, text, known in (("test file", options.tests, ALL_FILES), ("row", options.rows, ALL_ROWS)):
        names = {Path(name).name for name in text.split(",") if name}
        if unknown := names - set(known):
            parser.error(f"no {kind} is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        chosen.append(names)
    files, rows = chosen
    return measure(files, rows, options.out, options.dry_run)


if __name__ == "__main__":
    end_by_signals()
    sys.exit(main())
