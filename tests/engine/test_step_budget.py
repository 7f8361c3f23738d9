"""The size of a step from how long steps took."""

import random

import pytest

from engine.step_budget import LEAST_TOKENS, StepBudget


def test_it_finds_the_step_that_takes_the_target() -> None:
    budget, draw = StepBudget(0.050), random.Random(0)
    for _ in range(200):
        tokens = draw.randrange(1, 300)
        budget.observe(tokens, (0.010 + 0.0002 * tokens) * draw.uniform(0.95, 1.05))
    assert budget.prefill_tokens(decode_tokens=20, most=1000) == pytest.approx(180, rel=0.1)


def test_it_follows_a_machine_that_became_slower() -> None:
    budget = StepBudget(0.050)
    for slowness in (1, 4):
        for tokens in range(1, 300):
            budget.observe(tokens, 0.0002 * tokens * slowness)
    assert budget.prefill_tokens(0, most=1000) == pytest.approx(62, rel=0.1)


def test_steps_of_one_size_are_scaled() -> None:
    budget = StepBudget(0.050)
    for _ in range(10):
        budget.observe(100, 0.025)
    assert budget.prefill_tokens(0, most=1000) == 200


@pytest.mark.parametrize(("most", "expected"), [(100, LEAST_TOKENS), (5, 5)])
def test_at_first_it_dares_little(most: int, expected: int) -> None:
    assert StepBudget(0.050).prefill_tokens(0, most) == expected


def test_it_never_exceeds_what_is_allowed() -> None:
    budget = StepBudget(1.0)
    budget.observe(50, 0.001)
    assert budget.prefill_tokens(0, most=64) == 64


def test_it_gropes_its_way_to_large_steps() -> None:
    budget = StepBudget(1.0)
    sizes = [16]
    while sizes[-1] < 200:
        budget.observe(sizes[-1], 0.0001 * sizes[-1])
        sizes.append(budget.prefill_tokens(0, most=1000))
    assert sizes == [16, 32, 64, 128, 256]


def test_small_steps_that_differ_by_chance_say_nothing_of_large_ones() -> None:
    budget, draw = StepBudget(0.050), random.Random(1)
    for _ in range(500):
        budget.observe(draw.choice([4, 5]), draw.uniform(0.005, 0.010))
        assert budget.prefill_tokens(5, most=1000) <= LEAST_TOKENS


def test_a_target_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        StepBudget(0.0)
