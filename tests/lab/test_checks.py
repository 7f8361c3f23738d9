"""`baton test` runs its checks concurrently and reports every failure."""

from pathlib import Path

import pytest

import baton.lab.checks
from baton.lab.checks import Check, avoidable, run_checks, run_stage

FINE = Check("fine", ["platform"])
BROKEN = Check("broken", ["no_such_module_of_python"])


def test_output_of_a_concurrent_check_is_kept(tmp_path: Path) -> None:
    fine, _ = run_stage([FINE, FINE], tmp_path)
    assert fine.passed and fine.output


@pytest.mark.parametrize("stages", [[[BROKEN, FINE]], [[FINE, BROKEN]], [[BROKEN], [FINE]]])
def test_failure_anywhere_fails_all(
    stages: list[list[Check]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(baton.lab.checks, "all_checks", lambda: stages)
    assert run_checks([]) == 1
    printed = capfd.readouterr().out
    assert "FAILED: broken" in printed
    assert "fine passed" in printed


TESTS = """
import pytest

{failing}
@pytest.mark.skip(reason="needs a GPU")
def test_on_a_gpu() -> None: ...

@pytest.mark.skipif({skips}, reason="Chromium is not installed")
@pytest.mark.parametrize("number", [1, 2])
def test_in_a_browser(number: int) -> None: ...

@pytest.mark.xfail(strict=True)
def test_that_is_expected_to_fail() -> None:
    assert False
"""
FAILS_FIRST = """
from pathlib import Path

def test_that_would_pass_a_second_time() -> None:
    ran = Path(__file__).with_name("ran")
    first = not ran.exists()
    ran.touch()
    assert not first
"""


def test_missing_hardware_is_no_avoidable_skip() -> None:
    skips = {"needs two GPUs": 1, "needs a processor with AVX-512": 2, "Chromium is not installed": 3}
    assert avoidable(skips) == ["Chromium is not installed"]


ON_A_LAPTOP = "== skipped tests: 2 (Chromium is not installed), 1 (needs a GPU)\n"


@pytest.mark.parametrize(
    ("failing", "skips", "no_skips", "status", "end"),
    [
        ("", True, False, 0, f"{ON_A_LAPTOP}== all passed\n"),
        ("", True, True, 1, f"{ON_A_LAPTOP}== FAILED: skipped (Chromium is not installed)\n"),
        ("", False, True, 0, "== skipped tests: 1 (needs a GPU)\n== all passed\n"),
        (FAILS_FIRST, False, False, 1, "== skipped tests: 1 (needs a GPU)\n== FAILED: written\n"),
    ],
)
def test_run_fails_by_its_first_failure_and_in_ci_by_what_it_skips(
    failing: str,
    skips: bool,
    no_skips: bool,
    status: int,
    end: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "test_written.py"
    file.write_text(TESTS.format(failing=failing, skips=skips))
    check = Check("written", ["pytest", "--rootdir", str(tmp_path), "-p", "no:cacheprovider", str(file)])
    monkeypatch.setattr(baton.lab.checks, "all_checks", lambda: [[check]])
    assert run_checks([], no_skips) == status
    assert capfd.readouterr().out.endswith(end)


def test_pytest_that_does_not_start_fails_and_skips_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_checks([str(tmp_path / "no_such_file.py")]) == 1
    assert "== skipped tests: none\n== FAILED: tests" in capfd.readouterr().out
