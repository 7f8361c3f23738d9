"""How many prompt tokens go into a step beside answers, from how long steps took."""

import random
from itertools import pairwise

import pytest

from baton.engine.scheduler.budget import LEAST_TOKENS, PROBE_EVERY, SHARE, PromptRates, StepBudget

OWN_S, TOKEN_S = 0.020, 0.0001  # ten tokens are the share that is aimed at


def learned(budget: StepBudget, steps: int = 400, own_s: float = OWN_S, token_s: float = TOKEN_S) -> StepBudget:
    """After steps of four answers with as many prompt tokens as it allows, and a little noise."""
    draw = random.Random(0)
    for _ in range(steps):
        tokens = budget.prompt_tokens(4, most=512)
        budget.observe(4, tokens, (own_s + token_s * tokens) * draw.uniform(0.99, 1.01))
    return budget


def allowed(budget: StepBudget, answers: int = 4, most: int = 512) -> int:
    """In the next step that is not measured."""
    budget.observe(4, 0, OWN_S)
    return budget.prompt_tokens(answers, most)


def test_prompts_take_their_share_of_a_step() -> None:
    assert allowed(learned(StepBudget())) == pytest.approx(SHARE * OWN_S / TOKEN_S, abs=2)


def test_with_a_target_they_take_what_is_left_of_it() -> None:
    assert allowed(learned(StepBudget(0.050))) == pytest.approx((0.050 - OWN_S) / TOKEN_S, rel=0.15)


def test_a_target_below_what_answers_take_leaves_the_share() -> None:
    assert allowed(learned(StepBudget(0.001))) == allowed(learned(StepBudget()))


def test_a_prompt_goes_on_by_a_token_where_even_that_is_too_much() -> None:
    assert allowed(learned(StepBudget(), token_s=0.010)) == LEAST_TOKENS


def test_what_does_not_fit_into_the_step_is_not_allowed() -> None:
    assert [allowed(learned(StepBudget()), most=most) for most in (0, 3)] == [0, 3]


def test_the_first_step_beside_answers_is_measured_without_prompt_tokens() -> None:
    assert StepBudget().prompt_tokens(1, most=100) == 0


def test_every_few_steps_one_is_measured_without_prompt_tokens() -> None:
    budget, sizes = learned(StepBudget()), list[int]()
    for _ in range(3 * PROBE_EVERY):
        sizes.append(budget.prompt_tokens(4, most=512))
        budget.observe(4, sizes[-1], OWN_S + TOKEN_S * sizes[-1])
    probes = [number for number, size in enumerate(sizes) if size == 0]
    assert len(probes) == 3
    assert {after - before for before, after in pairwise(probes)} == {PROBE_EVERY}
    assert all(size == 0 or size > LEAST_TOKENS for size in sizes)


def test_step_after_an_odd_measurement_is_measured_again_before_any_prompt_token() -> None:
    budget = learned(StepBudget())
    before = allowed(budget)
    budget.observe(4, 0, 2 * OWN_S)
    assert budget.prompt_tokens(4, most=512) == 0, "steps may have changed: another one shows it"
    budget.observe(4, 0, OWN_S)
    assert budget.prompt_tokens(4, most=512) == before, "they have not"


def test_steps_before_an_odd_measurement_change_no_cost() -> None:
    """They may have been disturbed with it, and what they are compared with may be out of date."""
    budget = learned(StepBudget())
    before = allowed(budget)
    budget.observe(4, before, 3 * OWN_S)
    budget.observe(4, 0, 3 * OWN_S)
    assert allowed(budget) == before


def test_it_gropes_its_way_to_large_chunks() -> None:
    budget, largest = StepBudget(1.0), 0
    for _ in range(100):
        tokens = budget.prompt_tokens(1, most=512)
        assert tokens <= max(LEAST_TOKENS, 2 * largest)
        largest = max(largest, tokens)
        budget.observe(1, tokens, 0.001 + 0.0001 * tokens)
    assert largest == 512


def test_noise_never_makes_tokens_look_free() -> None:
    budget, draw = StepBudget(), random.Random(1)
    for _ in range(3000):
        tokens = budget.prompt_tokens(4, most=512)
        assert TOKEN_S * tokens <= 0.10 * OWN_S
        budget.observe(4, tokens, (OWN_S + TOKEN_S * tokens) * draw.uniform(0.9, 1.1))


def test_one_disturbed_step_starves_no_prompt() -> None:
    for place in range(PROBE_EVERY):
        budget = learned(StepBudget())
        before = allowed(budget)
        for number in range(2 * PROBE_EVERY):
            tokens = budget.prompt_tokens(4, most=512)
            budget.observe(4, tokens, OWN_S + TOKEN_S * tokens + (0.030 if number == place else 0.0))
        assert allowed(budget) >= 0.6 * before, f"disturbed in step {place}"


def test_it_follows_a_machine_that_became_slower() -> None:
    budget = learned(learned(StepBudget()), own_s=2 * OWN_S, token_s=4 * TOKEN_S)
    budget.observe(4, 0, 2 * OWN_S)
    assert budget.prompt_tokens(4, most=512) == pytest.approx(5, abs=1)


def test_a_number_of_answers_that_is_new_is_measured_at_once() -> None:
    budget = learned(StepBudget())
    budget.observe(4, 3, OWN_S)
    assert budget.prompt_tokens(9, most=512) == 0


def test_steps_without_answers_say_nothing_of_steps_with_answers() -> None:
    budget = learned(StepBudget())
    before = allowed(budget)
    for _ in range(100):
        budget.observe(0, 512, 10.0)
    assert allowed(budget) == before
    assert budget.rates(512).alone_tokens_per_s == pytest.approx(51.2)


def test_what_it_would_compute_beside_answers_is_told_once_it_is_known() -> None:
    assert StepBudget().rates(512) == PromptRates(None, None)
    told = learned(StepBudget()).rates(512).beside_tokens_per_s
    assert told == pytest.approx(10 * (PROBE_EVERY - 1) / PROBE_EVERY / (1.04 * OWN_S), rel=0.2)


def test_a_target_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        StepBudget(0.0)
