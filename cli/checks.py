"""`baton test`: style, types and tests, in that order; all of them run whatever the first says."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from cli.paths import ROOT

# Tiny models gain nothing from more threads, and spinning ones take the cores from the processes under test.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
END_TO_END = "tests/e2e"
TYPED = [
    "router",
    "prefill_worker",
    "decode_worker",
    "worker",
    "kvtransfer",
    "kernels",
    "engine",
    "service",
    "client",
    "cli",
]


def run_checks(pytest_arguments: Sequence[str]) -> int:
    """0 where everything passed, else 1. With arguments for pytest only pytest runs: someone looks for one thing."""
    commands = {"tests": ["pytest", *pytest_arguments]}
    if not pytest_arguments:
        cores = str(len(os.sched_getaffinity(0)))
        commands = {
            "style": ["ruff", "check", "."],
            "format": ["ruff", "format", "--check", "."],
            "types": ["mypy", *TYPED],
            # A module's tests stay together, for the sake of what they share.
            "unit tests": ["pytest", "--numprocesses", cores, "--dist", "loadfile", "--ignore", END_TO_END],
            # One at a time: each has processes of its own, and measures how long they take.
            "end to end": ["pytest", END_TO_END],
        }
    verdicts = []
    for name, command in commands.items():
        print(f"== {name}: {' '.join(command)}", flush=True)
        start = time.monotonic()
        code = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=ONE_THREAD, check=False).returncode
        verdicts.append((name, code, time.monotonic() - start))
    failed = [name for name, code, _ in verdicts if code != 0]
    print("== " + ", ".join(f"{name} {'FAILED' if code else 'passed'} ({took:.0f} s)" for name, code, took in verdicts))
    print(f"== {'FAILED: ' + ', '.join(failed) if failed else 'all passed'}", flush=True)
    return 1 if failed else 0
