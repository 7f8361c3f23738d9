"""Duration of steps by measured curves, and invalid curves."""

from collections.abc import Mapping
from typing import Any

import pytest

from baton.engine.request import Chunk, Plan, Sample, SamplingParams
from baton.lab.sizing.costs import BY_BATCH, BY_CONTEXT, BY_PROMPT, Curve, CurvesError, MeasuredCosts, read_costs

PARAMS = SamplingParams(max_tokens=8)


def curve(name: str, points: Mapping[int, float]) -> dict[str, Any]:
    return {"name": name, "points": [{"x": x, "measured_ms": ms, "limit_ms": 1.0} for x, ms in points.items()]}


def measured(**other: Any) -> dict[str, Any]:
    """Make curves: a step has 10 ms, 1 ms per further sequence, 1 us per context token; prompts 5 + 0.5 ms/token."""
    curves = [
        curve(BY_BATCH, {1: 10.0, 2: 11.0, 4: 13.0}),
        curve(BY_CONTEXT, {100: 9.6, 500: 10.0}),
        curve(BY_PROMPT, {100: 55.0, 200: 105.0, 400: 205.0}),
    ]
    return {"curves": curves, "batch_context_tokens": 500, "step_tokens": 512, **other}


def costs() -> MeasuredCosts:
    return read_costs(measured())


def answer(context_tokens: int) -> Chunk:
    return Chunk(1, (7,), context_tokens - 1, (0,), (Sample(0, PARAMS),))


def prompt(start: int, tokens: int, draws: bool = False) -> Chunk:
    return Chunk(2, (7,) * tokens, start, (0,), (Sample(0, PARAMS),) if draws else ())


def ms(*chunks: Chunk) -> float:
    return 1e3 * costs().seconds(Plan(chunks))


def test_step_of_answers_takes_as_long_as_measured_and_context_adds_its_slope() -> None:
    assert ms(answer(500)) == pytest.approx(10.0)
    assert ms(*[answer(500)] * 3) == pytest.approx(12.0), "between two measured batches"
    assert ms(answer(500), answer(1500)) == pytest.approx(11.0 + 1000 * 0.001)


def test_prompt_costs_the_same_in_one_step_and_in_two_but_for_the_fixed_part() -> None:
    whole = ms(prompt(0, 400, draws=True))
    parts = ms(prompt(0, 250)) + ms(prompt(250, 150, draws=True))
    assert whole == pytest.approx(205.0)
    assert parts == pytest.approx(whole + 5.0)


def test_beside_answers_prompt_tokens_have_no_fixed_part_of_their_own() -> None:
    assert ms(answer(500), prompt(0, 100)) == pytest.approx(10.0 + 50.0)


def test_beyond_the_measured_points_the_last_line_goes_on() -> None:
    made = Curve(((100.0, 55.0), (200.0, 105.0)))
    assert (made.at(400.0), made.at_zero) == (205.0, 5.0)
    assert Curve(((100.0, 5.0), (200.0, 105.0))).at_zero == 0.0


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        ({}, "no curve is named 'decode step against batch'"),
        (measured(curves=measured()["curves"][:2]), "no curve is named 'time to first token'"),
        (
            measured(curves=[curve(BY_BATCH, {1: 1.0}), *measured()["curves"][1:]]),
            "needs two points or more, and has 1",
        ),
        (measured(curves=[curve(BY_BATCH, {1: 0.0, 2: 1.0}), *measured()["curves"][1:]]), "a time of 0 ms or less"),
        (measured(batch_context_tokens=None), "not as `baton bench curves` writes them"),
    ],
)
def test_file_that_is_no_file_of_curves_is_refused_with_its_fault(plain: Mapping[str, Any], said: str) -> None:
    with pytest.raises(CurvesError, match=said):
        read_costs(plain)


def test_rate_of_prompts_is_that_of_the_longest_measured() -> None:
    assert costs().prefill_tokens_per_s == pytest.approx(400 / 0.205)
