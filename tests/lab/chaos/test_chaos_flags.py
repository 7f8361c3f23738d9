"""Options that the flags of `baton chaos` give a run. Nothing is started."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import baton.lab.chaos.report
from baton.cli.__main__ import app
from baton.lab.chaos.run import ChaosOptions
from baton.lab.chaos.stack import Layout


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ChaosOptions, Path | None]]:
    """Options and folder of each run that would have been started; all are good."""
    runs: list[tuple[ChaosOptions, Path | None]] = []

    def run_chaos(options: ChaosOptions, folder: Path | None) -> bool:
        runs.append((options, folder))
        return True

    monkeypatch.setattr(baton.lab.chaos.report, "run_chaos", run_chaos)
    return runs


def chaos(*flags: str) -> Result:
    return CliRunner().invoke(app, ["chaos", *flags])


def test_chaos_flags_become_the_options_of_the_run(asked: list[tuple[ChaosOptions, Path | None]]) -> None:
    done = chaos("--routers", "4", "--minutes", "0.5", "--seed", "7", "--streams", "3", "--no-tier", "--out", "report")
    assert done.exit_code == 0, done.output
    [(options, folder)] = asked
    assert (options.minutes, options.seed, options.clients, options.tier) == (0.5, 7, 3, False)
    assert options.layout == Layout(routers=4, shares_ports=True)
    assert len(options.plan) > 1 and folder == Path("report")


def test_chaos_over_hosts_has_no_files_of_kv(asked: list[tuple[ChaosOptions, Path | None]]) -> None:
    assert chaos("--hosts", "3").exit_code == 0
    assert (asked[0][0].hosts, asked[0][0].tier, asked[0][0].layout) == (3, False, Layout())


def test_chaos_with_routers_and_hosts_is_refused(asked: list[tuple[ChaosOptions, Path | None]]) -> None:
    done = chaos("--routers", "4", "--hosts", "3")
    assert done.exit_code == 2 and "cannot be combined" in done.output and not asked


def test_chaos_subcommand_starts_no_chaos_run(asked: list[tuple[ChaosOptions, Path | None]]) -> None:
    assert chaos("cancels", "--help").exit_code == 0
    assert not asked
