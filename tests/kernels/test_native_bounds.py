"""Tests of the native kernels once more, under AddressSanitizer: no byte outside a tensor is touched."""

import os
import re
import subprocess
import sys
from pathlib import Path

from baton import IMPORT_PATH
from baton.kernels.native.build import build
from tests.fixtures.native_levels import CHECKED, FOLDER, HALF_THE_TIME
from tests.fixtures.tools import ROOT, tool

TIMEOUT_S = 300
CHECKED_BY_CALLS = ("--param", "asan-instrumentation-with-call-threshold=0")  # a fifth less for the compiler to write
FILES = [
    file for file in Path(__file__).parent.glob("test_*.py") if re.search(r"TESTED\)$", file.read_text(), re.MULTILINE)
]
"""Whose tests run at every level."""
SCRIPT = """
import sys
from pathlib import Path
import pytest
from tests.fixtures import native_levels

library, level, *files = sys.argv[1:]
native_levels.TESTED[:] = [level]
native_levels.built_at = lambda level: Path(library)
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *files]))
"""


def test_no_byte_outside_the_tensors_is_touched() -> None:
    found = subprocess.run([tool("g++"), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_absolute(), "needs a g++ with AddressSanitizer; on Debian: apt install g++"
    folder = FOLDER / "checked"
    folder.mkdir(parents=True, exist_ok=True)
    library = build(CHECKED, folder, (*HALF_THE_TIME, "-fsanitize=address", *CHECKED_BY_CALLS))
    environment = {
        **os.environ,
        "LD_PRELOAD": found.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(IMPORT_PATH), str(ROOT)]),
    }
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(library), CHECKED, *map(str, FILES)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert re.search(r"[1-9]\d* passed", ran.stdout)
