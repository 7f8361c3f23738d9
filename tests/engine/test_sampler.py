"""Sampling against transformers' filters and against the distribution it must follow."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.plan import NonFinite, Sample
from engine.sampler import Candidates, Row, filtered, pick, sample
from engine.sampling_params import SamplingParams
from tests.fixtures.paged import drawn

RANDOM = SamplingParams(max_tokens=1, temperature=0.8, seed=11)
GREEDY = SamplingParams(max_tokens=1)


def random_logits(rows: int, vocab_size: int = 300) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(5)) * 3


@pytest.mark.parametrize(
    "params",
    [
        replace(RANDOM, top_k=20),
        replace(RANDOM, top_p=0.7),
        replace(RANDOM, top_p=0.0),
        replace(RANDOM, min_p=0.1),
        replace(RANDOM, min_p=1.0),
        replace(RANDOM, temperature=1.7, top_k=50, top_p=0.9, min_p=0.02),
        replace(RANDOM, top_k=1000),
    ],
)
def test_filters_leave_the_tokens_that_transformers_leaves(params: SamplingParams) -> None:
    warpers: Any = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    logits = random_logits(20)
    warped = warpers(torch.zeros(20, 1, dtype=torch.long), logits)
    for row, expected in zip(logits, warped, strict=True):
        candidates = filtered(row, params)
        assert candidates.token_ids.tolist() == torch.nonzero(expected.isfinite())[:, 0].tolist()
        shares = candidates.cumulative.diff(prepend=torch.zeros(1, dtype=torch.float64)) / candidates.cumulative[-1]
        torch.testing.assert_close(shares.float(), expected.softmax(-1)[candidates.token_ids])


def test_top_p_that_ends_exactly_at_a_token_leaves_the_rest_out() -> None:
    assert len(filtered(torch.zeros(4), replace(RANDOM, temperature=1.0, top_p=0.5)).token_ids) == 2


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 12 tokens, 11 degrees of freedom: 31.3 is exceeded by chance once in a thousand."""
    draws = 6000
    logits = random_logits(1, 12) / 3
    samples = tuple(Sample(choice, RANDOM) for choice in range(draws))
    [result] = sample(logits, [Row(samples, 9)])
    counts = torch.bincount(torch.tensor([token.token_id for token in drawn(result)]), minlength=12)
    expected = (logits[0].double() / RANDOM.temperature).softmax(0) * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 31.3


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    logits = random_logits(4)
    row = Row((Sample(1, RANDOM),), 40)
    [alone] = sample(logits[2:3], [row])
    others = [Row((Sample(0, GREEDY),), 7), Row((Sample(0, replace(RANDOM, seed=3)),), 8), row, Row((), 1)]
    assert sample(logits, others)[2] == alone


def test_choices_of_one_row_are_drawn_apart() -> None:
    samples = tuple(Sample(choice, RANDOM) for choice in range(30))
    [result] = sample(random_logits(1) / 3, [Row(samples, 9)])
    assert len({token.token_id for token in drawn(result)}) > 10


def test_greedy_takes_the_likeliest_with_its_logprob() -> None:
    logits = random_logits(3)
    results = sample(logits, [Row((Sample(0, GREEDY),), 1)] * 3)
    for row, result in zip(logits, results, strict=True):
        [token] = drawn(result)
        assert token.token_id == int(row.argmax())
        assert token.logprob == pytest.approx(float(row.log_softmax(-1).max()), abs=1e-5)


def test_logprob_is_that_of_the_model_before_temperature_and_filters() -> None:
    logits = random_logits(1)
    [result] = sample(logits, [Row((Sample(0, replace(RANDOM, temperature=5.0, top_k=5)),), 1)])
    [token] = drawn(result)
    assert token.logprob == pytest.approx(float(logits[0].log_softmax(-1)[token.token_id]), abs=1e-5)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("params", [GREEDY, RANDOM])
def test_a_row_that_is_not_finite_fails_alone(poison: float, params: SamplingParams) -> None:
    logits = random_logits(3)
    rows = [Row((Sample(0, params),), position) for position in range(3)]
    clean = sample(logits, rows)
    logits[1, 17] = poison
    assert sample(logits, rows) == [clean[0], NonFinite(), clean[2]]


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = random_logits(5)
    results = sample(logits, [Row((Sample(0, replace(RANDOM, temperature=1e-300)),), 1)] * 5)
    assert [drawn(result)[0].token_id for result in results] == logits.argmax(-1).tolist()


def test_pick_never_takes_a_token_without_mass() -> None:
    candidates = Candidates(torch.tensor([3, 5, 8, 9]), torch.tensor([0.0, 0.5, 0.5, 0.5], dtype=torch.float64))
    assert {pick(candidates, number) for number in (0.0, 0.5, 1 - 2.0**-53)} == {5}
