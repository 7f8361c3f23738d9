"""What the benchmark of predictions measures first, and how it says how wrong they were."""

from dataclasses import replace

import pytest

from baton.lab.benchmarks.cluster.sizing import (
    LOADS,
    Compared,
    capacity_per_s,
    fit_overheads,
    idle_of,
    median_error,
    probes,
    settings,
)
from baton.lab.sizing.cluster import run_cluster
from baton.lab.sizing.costs import Overheads, PacedCosts
from baton.lab.sizing.trials import Figures

STEP_S, TOKEN_S = 0.02, 0.001


def test_overheads_are_found_again_from_what_an_idle_cluster_shows() -> None:
    setting = probes({"paced": [STEP_S, TOKEN_S]})
    setting = replace(setting, calls=setting.calls[:5])
    planted = Overheads(message_s=9e-4, step_s=5e-4, copy_s=0.0)
    shown = idle_of(run_cluster(setting.cluster, PacedCosts(STEP_S, TOKEN_S), planted, setting.calls, seed=5))
    fitted = fit_overheads(shown, setting, Overheads(message_s=0.0, step_s=0.0, copy_s=0.0))
    assert fitted.step_s == pytest.approx(planted.step_s, abs=1e-4)
    assert fitted.message_s == pytest.approx(planted.message_s, rel=0.3)


def test_there_are_twelve_settings_of_one_to_three_workers_of_each_role_at_three_loads() -> None:
    chosen = list(settings(5.0, short=False, model=None, curves=None))
    assert len(chosen) == 12
    assert {each.load for each in chosen} == set(LOADS)
    workers = [(each.cluster.prefill, each.cluster.decode) for each in chosen]
    assert [{pair[role] for pair in workers} for role in (0, 1)] == [{1, 2, 3}, {1, 3}]
    for each in chosen:
        assert len(each.calls) / 5.0 == pytest.approx(each.load * capacity_per_s(each.cluster, each.costs), rel=0.6)


def test_the_error_is_of_the_measured_value_and_the_median_over_settings_and_figures() -> None:
    def row(predicted_ms: float) -> Compared:
        measured = Figures(9, 0, 100.0, 200.0, 10.0, 20.0, 1.0, 1.0, 1.0)
        return Compared("1P+1D", 0.3, Figures(9, 0, predicted_ms, 200.0, 10.0, 20.0, 1.0, 1.0, 1.0), measured)

    assert row(90.0).error("ttft_p50_ms") == pytest.approx(-0.1)
    assert median_error([row(90.0), row(120.0), row(130.0)], ["ttft_p50_ms"]) == pytest.approx(0.2)
