"""Figures of `baton bench isolation`: what counts, medians over rounds, and the verdict."""

import pytest

from baton.lab.benchmarks.isolation.figures import (
    EngineTime,
    LoadObjectives,
    PhaseFigures,
    Report,
    Step,
    TimeSpread,
    as_json,
    as_picture,
    as_table,
    figures_of,
    judge,
)
from baton.lab.benchmarks.isolation.isolation import phases_of_round
from baton.lab.benchmarks.isolation.load import LoadPhase, PhaseLoad, PhaseLog, StreamLog
from baton.lab.commands.bench_options import Variant
from baton.lab.report.statistics import medians
from baton.launch import CommandFailed

OBJECTIVES = LoadObjectives(ttft_ms=500.0, tbt_ms=15.0)
LOAD = PhaseLoad(1.0, 4, 64, 4096, 1024, 1.0, 3)


def figures(p99: float, tokens_per_s: float = 100.0, step_p99: float | None = None) -> PhaseFigures:
    step = None if step_p99 is None else TimeSpread(1.0, step_p99, step_p99, step_p99)
    return PhaseFigures(
        TimeSpread(1.0, p99, p99, p99), step, None, None, tokens_per_s, tokens_per_s, 0.0, 0.0, None, None
    )


def test_only_gaps_that_end_while_it_counts_are_counted() -> None:
    log = PhaseLog(began=10.0, ended=11.0, answers=[StreamLog(9.0, [9.5, 10.0, 10.01, 10.05, 11.0])])
    counted = figures_of(log, OBJECTIVES)
    assert counted.tbt.max == pytest.approx(500.0)
    assert counted.tbt.p50 == pytest.approx(40.0)
    assert counted.answer_tokens_per_s == pytest.approx(3.0)
    assert counted.answer_goodput_per_s == pytest.approx(1.0)  # of gaps of 500, 10 and 40 ms


def test_phase_in_which_no_answer_went_on_asks_for_more_time() -> None:
    log = PhaseLog(began=10.0, ended=15.0, answers=[StreamLog(9.0, [9.5])])
    with pytest.raises(CommandFailed, match=r"no long answer .* in 5\.0 s: increase --seconds"):
        figures_of(log, OBJECTIVES)


def test_prompts_count_by_their_first_token_and_unanswered_ones_do_not() -> None:
    prompts = [StreamLog(9.8, [10.2]), StreamLog(9.9, [10.9]), StreamLog(10.0, [11.2]), StreamLog(10.1)]
    log = PhaseLog(10.0, 11.0, [StreamLog(9.0, [9.5, 10.0])], prompts)
    counted = figures_of(log, OBJECTIVES)
    assert counted.prompts_per_s == pytest.approx(2.0)
    assert counted.prompt_goodput_per_s == pytest.approx(1.0)
    assert counted.prompt_ttft is not None
    assert counted.prompt_ttft.max == pytest.approx(1000.0)


def test_time_of_the_engine_is_shared_out_over_the_steps_that_count() -> None:
    steps = [Step(9.0, 9.9, 4), Step(9.9, 10.2, 4), Step(10.3, 10.5, 4)]
    log = PhaseLog(10.0, 11.0, [StreamLog(9.0, [9.5, 10.0])])
    counted = figures_of(log, OBJECTIVES, steps, EngineTime(on_core=0.4, waiting=0.02))
    assert counted.engine_cpu_ms == pytest.approx(200.0)
    assert counted.engine_wait_ms == pytest.approx(10.0)
    assert counted.step is not None
    assert counted.step.p50 == pytest.approx(300.0)


def test_medians_leave_out_rounds_without_the_figure() -> None:
    middle = medians([figures(10.0, step_p99=5.0), figures(30.0), figures(20.0, step_p99=7.0)])
    assert middle.tbt.p99 == 20.0
    assert middle.step is not None
    assert middle.step.p99 == 6.0
    assert middle.prompt_ttft is None


def test_round_is_held_against_the_quiet_phase_of_the_same_round() -> None:
    quiet = [figures(10.0), figures(20.0), figures(40.0)]
    saturated = [figures(11.0), figures(22.0), figures(80.0)]
    verdict = judge({LoadPhase.QUIET: quiet, LoadPhase.SATURATED: saturated})
    assert verdict is not None
    assert verdict.p99_ratio == pytest.approx(1.1)
    assert verdict.holds


@pytest.mark.parametrize(("floor_p99", "holds"), [(11.0, False), (12.0, True)])
def test_memory_floor_may_be_exceeded_by_little(floor_p99: float, holds: bool) -> None:
    phases = {
        LoadPhase.QUIET: [figures(10.0)],
        LoadPhase.SATURATED: [figures(12.4)],
        LoadPhase.FLOOR: [figures(floor_p99)],
    }
    verdict = judge(phases)
    assert verdict is not None
    assert verdict.holds is holds


def test_slower_answers_fail_whatever_their_gaps() -> None:
    verdict = judge({LoadPhase.QUIET: [figures(10.0)], LoadPhase.SATURATED: [figures(10.0, tokens_per_s=94.0)]})
    assert verdict is not None
    assert not verdict.holds


def test_rounds_take_turns_in_which_phase_comes_first() -> None:
    phases = [phases_of_round(Variant.SPLIT, number) for number in range(4)]
    assert {each[0] for each in phases} == set(LoadPhase)
    assert all(set(each) == set(LoadPhase) for each in phases)


def test_report_has_a_row_per_phase_a_verdict_and_a_bar() -> None:
    rounds = {
        "1p1d": {LoadPhase.QUIET: [figures(10.0, step_p99=9.0)], LoadPhase.SATURATED: [figures(11.0, step_p99=9.9)]},
        "vllm": {LoadPhase.QUIET: [figures(26.0)], LoadPhase.SATURATED: [figures(433.0)]},
    }
    report = Report("smollm2", "float32", "none", (0, 1), LOAD, OBJECTIVES, rounds)
    table = as_table(report)
    assert "1p1d: p99 saturated over quiet: client 1.100 (at most 1.150); steps 1.100" in table
    assert "vllm: p99 saturated over quiet: client 16.654 (at most 1.150)" in table
    assert as_json(report)["verdicts"]["vllm"]["client"]["holds"] is False
    assert "433" in as_picture(report)


def test_json_judges_each_round_by_itself() -> None:
    saturated = [figures(11.0), figures(15.0), figures(10.0, tokens_per_s=90.0)]
    rounds = {"1p1d": {LoadPhase.QUIET: [figures(10.0)] * 3, LoadPhase.SATURATED: saturated}}
    found = as_json(Report("smollm2", "float32", "none", (0, 1), LOAD, OBJECTIVES, rounds))
    assert (found["verdict"]["held"], found["verdict"]["missed"]) == (1, 2)
    assert [each["1p1d"]["saturated"]["tbt"]["p99"] for each in found["rounds"]] == [11.0, 15.0, 10.0]
    assert found["verdicts"]["1p1d"]["client"]["holds"] is True, "medians over the rounds"
