"""Parts of `baton replay`'s predictions: step times, invented prompts, and the effect of a change."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from baton.lab.replay.decisions import PlacementCheck
from baton.lab.replay.fit import Work, fit_steps, gap_between_steps_s
from baton.lab.replay.load import InventedPrompts, calls_of
from baton.lab.replay.past import PastPrediction, PastPredictions, past_predictions
from baton.lab.replay.predict import PredictedRequest, WhatIf, scenario_of
from baton.lab.replay.record import RecordedRequest
from baton.lab.replay.report import ReplayResult, TtftPair, as_json, as_text, prediction_error
from baton.lab.sizing.runner import TOKEN
from baton.launch import CommandFailed
from tests.lab.replay.incidents import STEP_S, TOKEN_S, placed, record_of, recorded_request, steps_of

REQUESTS = [placed(recorded_request(f"r-{n}", 40, 12), 100) for n in range(3)]


def test_fit_of_linear_step_times_has_their_weights() -> None:
    fit = fit_steps([steps_of([(at, each) for at, each in zip((0, 3, 9), REQUESTS, strict=True)])])
    assert fit is not None and fit.median_error < 0.01
    assert fit.of(Work(1, 50, ((0, 20),))) == pytest.approx(STEP_S + 20 * TOKEN_S, rel=0.02)


def test_fit_without_steps_is_none() -> None:
    assert fit_steps([]) is None


def test_gap_between_steps_counts_adjacent_steps_without_idle_time() -> None:
    worker = steps_of([(0, REQUESTS[0])])
    first, second, third = worker.steps[:3]
    near = replace(second, began_us=first.ended_us + 700)
    idle = replace(third, began_us=near.ended_us + 90_000, spent_ms={"idle": 80.0})
    assert gap_between_steps_s([replace(worker, steps=(first, near, idle))]) == pytest.approx(7e-4)


def test_invented_prompts_share_exactly_the_recorded_blocks() -> None:
    invented = InventedPrompts()
    first, second = recorded_request("r-1", 15, 2, (1, 2, 3)), recorded_request("r-2", 14, 2, (1, 2, 9))
    one, two = invented.prompt(first), invented.prompt(second)
    assert (len(one), len(two)) == (15, 14)
    assert one[:8] == two[:8] and one[8:12] != two[8:12] and one[12:] != two[12:14]


def test_invented_prompt_of_a_next_turn_contains_the_simulated_answer() -> None:
    invented = InventedPrompts()
    first = invented.prompt(recorded_request("r-1", 10, 7, (1, 2)))
    turn = replace(recorded_request("r-2", 24, 3, (1, 2, 3, 4, 5, 6)), cached_tokens=16)
    assert invented.prompt(turn)[:16] == first + bytes([TOKEN]) * 6


def test_calls_fill_caches_that_were_warm_before_the_record() -> None:
    warm = replace(recorded_request("r-1", 15, 2, (1, 2, 3)), cached_tokens=8)
    first, second = calls_of([warm], 0.001)
    assert first.request_id == "warm-0" and first.prompt[:8] == second.prompt[:8] and len(first.prompt) == 9
    assert second.at_s > first.at_s and second.request_id == "r-1"


def test_simulation_without_an_unknown_request_is_refused() -> None:
    with pytest.raises(CommandFailed, match="--without r-9: the record has no such request"):
        scenario_of(record_of(REQUESTS), WhatIf(without=("r-9",)))


def test_scenario_of_a_change_has_fewer_requests_and_more_workers() -> None:
    record = record_of(REQUESTS, [steps_of([(0, each) for each in REQUESTS])])
    changed = scenario_of(record, WhatIf(("r-1",), add_prefill=1, add_decode=2))
    assert changed is not None
    assert [each.request_id for each in changed.requests] == ["r-0", "r-2"]
    assert (changed.shape.prefill, changed.shape.decode) == (1, 3)


def test_prediction_error_is_relative_to_the_measured_ttft() -> None:
    pairs = [
        TtftPair(replace(each, ttft_ms=100.0), PredictedRequest(each.request_id, ms, 0, "", "", ()), None)
        for each, ms in zip(REQUESTS, (90.0, 100.0, 130.0), strict=True)
    ]
    assert prediction_error(pairs).median == pytest.approx(0.1)
    assert prediction_error(pairs).p90 == pytest.approx(0.26)


def predicted(request: RecordedRequest, ttft_ms: float) -> PredictedRequest:
    return PredictedRequest(request.request_id, ttft_ms, 0, "", "decode-0", ())


def test_report_of_a_change_shows_the_truth_and_earlier_predictions() -> None:
    before = record_of([replace(each, ttft_ms=200.0) for each in REQUESTS])
    truth = record_of([replace(each, ttft_ms=100.0) for each in REQUESTS[1:]])
    past = PastPredictions((PastPrediction("without x", 9, 200.0, 190.0, 150.0, 100.0, 0.5, 0.9, 0.07),))
    result = ReplayResult(
        before,
        PlacementCheck(0, 0, ()),
        (),
        {},
        tuple(predicted(each, 190.0) for each in REQUESTS),
        WhatIf(("r-0",)),
        (predicted(REQUESTS[1], 80.0), predicted(REQUESTS[2], 110.0)),
        truth=truth,
        past=past,
    )
    text = as_text(result)
    assert "truth: measured median 100 ms instead of 200 ms; error of 2 predictions: median 15%, p90 19%" in text
    assert "1 earlier predictions of changes: median error per request 50%, worst 50%; 1 had the right sign" in text
    assert "the same load twice differed by 7%" in text
    found = {each["request_id"]: each["true_ttft_ms"] for each in as_json(result)["requests"]}
    assert found == {"r-0": None, "r-1": 100.0, "r-2": 100.0}


def test_past_predictions_are_read_from_a_result(tmp_path: Path) -> None:
    each = PastPrediction("with 1 more prefill worker", 40, 200.0, 190.0, 150.0, 220.0, 0.5, 0.9, 0.07)
    file = tmp_path / "past.json"
    assert past_predictions(file) is None
    file.write_text(json.dumps({"commit": "c", "rounds": [asdict(each)]}))
    assert past_predictions(file) == PastPredictions((each,)) and not each.has_right_sign


def test_what_if_is_described() -> None:
    assert str(WhatIf(("r-1",), add_prefill=1, add_decode=2)) == (
        "without r-1 and with 1 more prefill worker and with 2 more decode workers"
    )
