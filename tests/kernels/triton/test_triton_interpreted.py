"""Runs the tests of `interpreted_*.py` where Triton interprets its kernels: it decides that when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
TIMEOUT_S = 1800  # at the lowest priority, on a busy machine


def test_every_kernel_passes_its_tests_in_the_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "python_files=interpreted_*.py", FOLDER],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=FOLDER.parents[2],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
