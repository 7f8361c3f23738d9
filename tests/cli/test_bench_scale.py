"""`baton bench scale`: each of its measurements with real processes, for a moment."""

from baton.lab.benchmarks.scale.experiments import FaultShape, fleet_cost, survive_faults
from baton.lab.benchmarks.scale.fleet import FleetShape
from baton.lab.benchmarks.scale.real import beside_long_prompt, over_window
from baton.lab.benchmarks.scale.run import ScaleReport, as_text
from baton.lab.harness.processes import tiny_model


async def test_bench_scale_measures_workers_and_long_prompts() -> None:
    with tiny_model() as folder:
        cost = await fleet_cost(folder, workers=4, prompt_tokens=512, seconds=0.3)
    assert cost.rss_mib > 0 and cost.decision_us > 0
    assert cost.ids.requests > 0 and cost.chat.requests > 0
    assert cost.ids.failed == cost.chat.failed == 0
    assert "4 workers: every request was answered" in as_text(ScaleReport((cost,)))[-1]


async def test_bench_scale_answers_requests_while_workers_are_killed() -> None:
    of_fleet = FleetShape(workers=4, blocks=4, per_process=2)
    shape = FaultShape(of_fleet, 12, prompt_tokens=64, answer_tokens=20, concurrency=4, pause_s=0.1, lasts_s=0.2)
    with tiny_model() as folder:
        figures = await survive_faults(folder, shape)
    assert figures.killed_workers >= 2
    assert (figures.answered, figures.failed, figures.never_ended) == (12, 0, 0)


async def test_bench_scale_measures_a_full_window_and_a_long_prompt() -> None:
    with tiny_model() as folder:
        window = await over_window(folder, slots=2, requests=5)
        long = await beside_long_prompt(folder, prompt_tokens=2000, colocated=True, answers=2, seconds=0.5)
    assert (window.answered, window.failed) == (5, 0)
    assert long.before_tokens_per_s > 0 and long.during_tokens_per_s > 0
    report = ScaleReport(window=window, long=(long,))
    assert report.promises["window: every request was answered"]
    assert report.as_json()["verdict"]["held"] >= 1
