"""Tests of the native kernels once more, under AddressSanitizer and UndefinedBehaviorSanitizer."""

import os
import re
import subprocess
import sys
from pathlib import Path

from baton import IMPORT_PATH
from baton.kernels.native.build import build
from tests.fixtures.native_levels import CHECKED, FOLDER, HALF_THE_TIME
from tests.fixtures.tools import ROOT, tool

TIMEOUT_S = 1800  # at the lowest priority, on a busy machine
# What is left out takes the compiler long, and AddressSanitizer finds it too.
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize=null,object-size,pointer-overflow")
LIBRARIES = ("libubsan.so", "libasan.so")  # the other way round the log of the former stays empty
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


def test_native_kernels_under_sanitizers_report_nothing(tmp_path: Path) -> None:
    runtimes = [_runtime(name) for name in LIBRARIES]
    folder = FOLDER / "checked"
    folder.mkdir(parents=True, exist_ok=True)
    library = build(CHECKED, folder, (*HALF_THE_TIME, *SANITIZERS, *CHECKED_BY_CALLS))
    options = f"detect_leaks=0:verify_asan_link_order=0:log_path={tmp_path / 'report'}"
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": options,
        "UBSAN_OPTIONS": options,
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
    reports = [report.read_text() for report in tmp_path.glob("report*")]  # UndefinedBehaviorSanitizer ends no process
    assert not reports, reports[0][:3000]
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert re.search(r"[1-9]\d* passed", ran.stdout)


def _runtime(library: str) -> str:
    asked = [tool("g++"), f"-print-file-name={library}"]
    found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    assert Path(found).is_absolute(), f"needs a g++ with {library}; on Debian: apt install g++"
    return found
