"""`baton test` runs checks at once and forgets none of their failures."""

import pytest

import cli.checks
from cli.checks import Check, run_checks, run_stage

FINE = Check("fine", ["platform"])
BROKEN = Check("broken", ["no_such_module_of_python"])


def test_the_output_of_a_check_beside_another_is_kept() -> None:
    fine, _ = run_stage([FINE, FINE])
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
