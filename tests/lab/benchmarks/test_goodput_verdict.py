"""Verdict of `baton bench goodput` on figures that are given."""

from dataclasses import replace
from typing import Any

import pytest

from baton.lab.benchmarks.goodput.figures import GoodputFigures
from baton.lab.benchmarks.goodput.report import GoodputReport, as_result, as_table, judge_report, pictures_of
from baton.lab.benchmarks.goodput.verdict import Contest, PromiseFinding, dominates, judge_contest
from baton.process.objectives import LatencyObjectives

PLAIN = GoodputFigures(
    requests=10, answered=10, share_good=1.0, share_ttft=1.0, share_tbt=1.0, ttft_p50=500.0, ttft_p90=900.0,
    short_ttft_p50=400.0, short_ttft_p90=800.0, long_ttft_p50=700.0, long_ttft_p90=900.0, itl_p50=20.0, itl_p99=50.0,
    longest_gap=90.0, e2el_p50=3000.0, output_tokens_per_s=40.0, client_late_p99=1.0,
)  # fmt: skip
THEIRS = replace(PLAIN, share_good=0.7, ttft_p50=400.0, ttft_p90=700.0, itl_p99=1000.0, e2el_p50=9000.0)
SHARE, FALLEN, LATENCY, THROUGHPUT, ANSWER, DOMINANCE = range(6)


def figures(**changed: float | None) -> GoodputFigures:
    return replace(PLAIN, **changed)  # type: ignore[arg-type]


def contest(ours: dict[float, GoodputFigures], **more: Any) -> Contest:
    """Return a contest with saturation at 2 requests per second."""
    settings: dict[str, Any] = {
        "peers": {"vllm": dict.fromkeys(ours, THEIRS)},
        "our_tokens_per_s": 200.0,
        "peer_tokens_per_s": {"vllm": 100.0},
        "tokens_per_request": 100.0,
        "reference": "vllm",
    }
    return Contest(ours, **{**settings, **more})


def found(index: int, *arguments: Any, **more: Any) -> PromiseFinding:
    return judge_contest(contest(*arguments, **more))[index]


def test_everything_holds_for_figures_that_are_better() -> None:
    assert [each.holds for each in judge_contest(contest({1.0: PLAIN}))] == [True] * 6


def test_share_must_reach_the_best_setting_at_every_rate_up_to_saturation() -> None:
    best = {"vllm": {1.0: THEIRS, 3.0: PLAIN}, "vllm-c128": {1.0: figures(share_good=0.8)}}
    ours = {1.0: figures(share_good=0.75), 3.0: figures(share_good=0.5)}
    finding = found(SHARE, ours, peers=best)
    assert finding.holds is False
    assert finding.detail == "1/s: 0.75, vllm-c128 0.80"


def test_share_is_judged_at_the_lowest_rate_where_the_best_peer_has_fallen() -> None:
    peers = {"vllm": {0.5: PLAIN, 1.0: figures(share_good=0.85), 1.5: THEIRS}}
    ours = {0.5: PLAIN, 1.0: figures(share_good=0.94), 1.5: PLAIN}
    assert found(FALLEN, ours, peers=peers).detail == "1/s: 0.94, vllm 0.85"
    assert found(FALLEN, ours, peers={"vllm": {0.5: PLAIN}}).holds is None


@pytest.mark.parametrize(("changed", "holds"), [({"ttft_p50": 601.0}, False), ({"itl_p99": 126.0}, False), ({}, True)])
def test_latency_is_judged_against_vllm_in_each_round(changed: dict[str, float], holds: bool) -> None:
    assert found(LATENCY, {1.0: figures(**changed)}).holds is holds


def test_latency_is_not_judged_above_seven_tenths_of_saturation() -> None:
    assert found(LATENCY, {1.5: figures(ttft_p50=1e5)}).holds is None


def test_throughput_names_the_ratio_to_the_best_setting_as_well() -> None:
    finding = found(THROUGHPUT, {1.0: PLAIN}, peer_tokens_per_s={"vllm": 100.0, "vllm-s64": 250.0})
    assert (finding.holds, finding.detail) == (True, "2.00, of the best setting 0.80")
    assert found(THROUGHPUT, {1.0: PLAIN}, our_tokens_per_s=109.0).holds is False


def test_time_to_the_answer_is_at_most_six_tenths() -> None:
    assert found(ANSWER, {1.0: figures(e2el_p50=5500.0)}).holds is False


def test_setting_better_in_both_is_named() -> None:
    peers = {"vllm": {1.0: THEIRS}, "vllm-c64": {1.0: figures(ttft_p90=899.0, itl_p99=49.0)}}
    finding = found(DOMINANCE, {1.0: PLAIN}, peers=peers)
    assert (finding.holds, finding.detail) == (False, "1/s: vllm-c64")


def test_system_without_a_figure_dominates_nothing() -> None:
    assert not dominates(figures(itl_p99=None), PLAIN)


def report(**rounds: list[GoodputFigures]) -> GoodputReport:
    return GoodputReport(
        model="m", dtype="float32", objectives=LatencyObjectives(2000.0, 50.0), load="mix", duration="60 s", seed=0,
        in_flight_at_saturation=16, tokens_per_request=100.0, settings=dict.fromkeys(rounds, ""), batons=("ours",),
        rounds={name: {1.0: each} for name, each in rounds.items()}, saturated={}, errors={}, failures={},
    )  # fmt: skip


def test_verdict_is_on_medians_and_counts_the_rounds_that_held() -> None:
    ours = [figures(share_good=share) for share in (0.8, 0.9, 0.6)]
    given = report(ours=ours, vllm=[THEIRS] * 3)
    share = judge_report(given)["ours"][0]
    assert (share.finding.holds, share.held, share.missed) == (True, 2, 1)
    result = as_result(given)
    assert (result["verdict"]["held"], result["verdict"]["missed"]) == (2, 1)
    assert len(result["rounds"]) == 3


def test_table_shows_the_median_with_the_worst_round() -> None:
    ours = [figures(share_good=share, itl_p99=itl) for share, itl in ((0.8, 40.0), (0.9, 50.0), (0.6, 80.0))]
    line = next(line for line in as_table(report(ours=ours)).splitlines() if line.startswith("ours"))
    assert "0.80 (0.60)" in line
    assert "50 (80)" in line


def test_nothing_is_judged_without_a_peer() -> None:
    given = report(ours=[PLAIN])
    assert judge_report(given) == {}
    assert as_result(given)["verdict"] is None


def test_charts_name_every_system_and_skip_missing_figures() -> None:
    drawn = pictures_of(report(ours=[PLAIN], vllm=[figures(itl_p99=None)]))
    assert set(drawn) == {"share", "ttft-tbt", "answer"}
    assert ">vllm<" in drawn["share"]
    assert ">vllm<" not in drawn["ttft-tbt"]
