"""All tests of the GPU and all rows of the table: `benchmarks/gpu.sh`.

    python -m benchmarks.gpu [--rows NAME,NAME] [--no-tests] [--out FOLDER] [--dry-run]

Each row is written to FOLDER/ROW.json when it is done; the table comes last. Exit status 1 where a test or a row
failed; a target that is missed is no failure.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    "attention": ("decode_attention", "prefill_attention", "pages"),
    "engine": ("step_llama8b", "step_qwen0.6b", "throughput"),
    "workers": ("hand_over", "one_gpu"),
    "peers": ("transformers",),
    "flashinfer": ("flashinfer",),
}
"""Names of rows by module; a test holds them equal to what the modules have."""
ALL_ROWS = tuple(row for rows in MODULES.values() for row in rows)
MODULE_TIMEOUT_S = 180.0
TESTS_TIMEOUT_S = 240.0
WIDTHS = (18, 26, 12, 17, 16, 5)


def run_tests() -> int:
    """Without the project's own settings of pytest, whose plugins may not be here."""
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(ROOT), "--import-mode=importlib"]
    command += ["-p", "no:cacheprovider", "-q", "-rs", "tests/gpu"]
    return _run(command, TESTS_TIMEOUT_S)


def run_module(module: str, rows: Sequence[str], out: Path, dry: bool) -> int:
    command = [sys.executable, "-P", "-m", "benchmarks.gpu.run", module, "--rows", ",".join(rows), "--out", str(out)]
    return _run([*command, *(["--dry-run"] if dry else [])], MODULE_TIMEOUT_S)


def _run(command: Sequence[str], timeout_s: float) -> int:
    print(f"== {' '.join(command[1:])}", flush=True)
    try:
        return subprocess.run(command, cwd=ROOT, timeout=timeout_s, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"took longer than {timeout_s:g} s", flush=True)
        return 124


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
    codes = [] if options.no_tests else [run_tests()]
    for module, rows in MODULES.items():
        if chosen := [row for row in rows if row in wanted]:
            codes.append(run_module(module, chosen, options.out, options.dry_run))
    print(f"\n{table(options.out, wanted)}\n{time.monotonic() - started:.0f} s in all", flush=True)
    if options.dry_run:
        print("a dry run: no figure above says anything about anything", flush=True)
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
