"""Tests that failed beside everything else are run once more, alone; what passes then is told by name, never hidden.

On two busy cores a test with real processes can miss its bound without anything being wrong. More than a few failures
are no accident, and are not looked at again.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cli.paths import ROOT

MOST_TESTS = 3
TESTS_FAILED = 1  # pytest's exit status; others say that it could not run as it was asked to


@dataclass(frozen=True, slots=True)
class SecondLook:
    tests: tuple[str, ...]  # that failed at first
    passed: bool

    def __str__(self) -> str:
        verdict = "passed alone; unreliable under load" if self.passed else "failed alone too"
        return f"{verdict}: {', '.join(self.tests)}"


def noting_failures(folder: Path) -> list[str]:
    """Arguments that have pytest keep in `folder` which tests failed."""
    return ["-o", f"cache_dir={folder}"]


def look_again(folder: Path, status: int, environment: Mapping[str, str] = os.environ) -> SecondLook | None:
    """None where there is nothing to look at again: all passed, many failed, or pytest itself did not do its work."""
    noted = folder / "v" / "cache" / "lastfailed"
    if status != TESTS_FAILED or not noted.exists():
        return None
    tests = tuple(json.loads(noted.read_text()))
    if not 0 < len(tests) <= MOST_TESTS:
        return None
    print(f"== once more, alone: {', '.join(tests)}", flush=True)
    command = [sys.executable, "-m", "pytest", *noting_failures(folder), *tests]
    done = subprocess.run(command, cwd=ROOT, env=dict(environment), check=False)
    return SecondLook(tests, done.returncode == 0)
