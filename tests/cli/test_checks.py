"""`baton test` runs checks at once and forgets none of their failures."""

from pathlib import Path

import pytest

import cli.checks
import cli.second_look
from cli.checks import Check, run_checks, run_stage

FINE = Check("fine", ["platform"])
BROKEN = Check("broken", ["no_such_module_of_python"])


def test_the_output_of_a_check_beside_another_is_kept(tmp_path: Path) -> None:
    fine, _ = run_stage([FINE, FINE], tmp_path)
    assert fine.passed and fine.output


@pytest.mark.parametrize("stages", [[[BROKEN, FINE]], [[FINE, BROKEN]], [[BROKEN], [FINE]]])
def test_a_failure_anywhere_fails_all(
    stages: list[list[Check]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.checks, "all_checks", lambda: stages)
    assert run_checks([]) == 1
    printed = capfd.readouterr().out
    assert "FAILED: broken" in printed
    assert "fine passed" in printed


FAILS_FIRST = """
from pathlib import Path
HERE = Path(__file__).parent

def test_needs_a_second_run() -> None:
    first = not (HERE / "ran").exists()
    (HERE / "ran").touch()
    assert not first
"""


@pytest.mark.parametrize(
    ("test", "status", "told"),
    [
        (FAILS_FIRST, 0, "passed alone; unreliable under load"),
        ("def test_fails() -> None:\n    assert False\n", 1, "failed alone too"),
        ("".join(f"def test_{number}() -> None:\n    assert False\n" for number in range(4)), 1, ""),
        ("import no_such_module_of_python\n", 1, ""),
    ],
)
def test_what_failed_is_run_once_more_and_named(
    test: str,
    status: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "test_written.py"
    file.write_text(test)
    check = Check("written", ["pytest", "--rootdir", str(tmp_path), str(file)])
    monkeypatch.setattr(cli.checks, "all_checks", lambda: [[check]])
    monkeypatch.setattr(cli.second_look, "ROOT", tmp_path)
    assert run_checks([]) == status
    printed = capfd.readouterr().out
    assert (f"== written: {told}: " in printed) == bool(told)
    assert (f"== once more, alone: {file.name}" in printed) == bool(told)
