"""How many prompt tokens go into a step beside answers, from how long steps took."""

import random
from itertools import pairwise

import pytest

from baton.engine.scheduler.budget import (
    AIM_STEP,
    DELIVERY_SHARE,
    FIRST_AIM,
    MAX_ALONE_S,
    MAX_EXTRA_SHARE,
    MIN_ALONE_TOKENS,
    MIN_PRIOR_TOKENS,
    MIN_TOKENS,
    PRIOR_ERROR,
    PROBE_EVERY,
    SAFETY_SIGMAS,
    TARGET_SHARE,
    PrefillTokenCost,
    PromptRates,
    StepBudget,
)

OWN_S, TOKEN_S = 0.020, 0.0001  # ten tokens are the share that is aimed at
PLANNED = 1.0 - DELIVERY_SHARE


def learned(
    budget: StepBudget, steps: int = 400, own_s: float = OWN_S, token_s: float = TOKEN_S, target_s: float = 0.0
) -> StepBudget:
    """After steps of four answers with as many prompt tokens as it allows, and a little noise."""
    draw = random.Random(0)
    for _ in range(steps):
        tokens = budget.prompt_tokens(4, most=512, target_s=target_s)
        budget.observe(4, tokens, (own_s + token_s * tokens) * draw.uniform(0.99, 1.01))
    return budget


def allowed(budget: StepBudget, answers: int = 4, most: int = 512, target_s: float = 0.0) -> int:
    """In the next step that is not measured."""
    budget.observe(4, 0, OWN_S)
    return budget.prompt_tokens(answers, most, target_s=target_s)


def test_prompts_take_their_share_of_a_step() -> None:
    assert allowed(learned(StepBudget())) == pytest.approx(TARGET_SHARE * OWN_S / TOKEN_S, abs=2)


def test_budget_with_a_target_gives_prompts_what_answers_leave_of_it() -> None:
    budget = learned(StepBudget(), target_s=0.050)
    assert allowed(budget, target_s=0.050) == pytest.approx((FIRST_AIM * 0.050 - OWN_S) / TOKEN_S, rel=0.1)


def test_budget_leaves_more_of_a_target_once_answers_waited_longer_than_it() -> None:
    budget = learned(StepBudget(), target_s=0.050)
    before = allowed(budget, target_s=0.050)
    budget.observe(4, before, OWN_S + TOKEN_S * before, period_s=0.051)
    assert allowed(budget, target_s=0.050) == pytest.approx(before - AIM_STEP * 0.050 / TOKEN_S, abs=1)


def test_a_target_below_what_answers_take_is_doubled_until_they_meet_it() -> None:
    budget = learned(StepBudget())
    assert budget.goal_s(4, [0.8 * OWN_S, 5 * OWN_S]) == pytest.approx(PLANNED * 1.6 * OWN_S)
    assert budget.goal_s(4, [0.1 * OWN_S, 1.3 * OWN_S]) == pytest.approx(PLANNED * 1.3 * OWN_S), "each is doubled alone"


def test_a_target_that_one_step_in_a_hundred_misses_without_prompts_is_doubled() -> None:
    budget, draw = StepBudget(), random.Random(1)
    for _ in range(400):
        budget.observe(4, 0, OWN_S * draw.gauss(1.0, 0.08))
    assert budget.goal_s(4, [1.1 * OWN_S]) == pytest.approx(PLANNED * 2.2 * OWN_S)
    assert budget.goal_s(4, [1.3 * OWN_S]) == pytest.approx(PLANNED * 1.3 * OWN_S)


def test_a_prompt_goes_on_by_a_token_where_even_that_is_too_much() -> None:
    assert allowed(learned(StepBudget(), token_s=0.010)) == MIN_TOKENS


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
    assert all(size == 0 or size > MIN_TOKENS for size in sizes)


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


def test_budget_grows_chunks_step_by_step() -> None:
    budget, largest = StepBudget(), 0
    for _ in range(100):
        tokens = budget.prompt_tokens(1, most=512, target_s=1.0)
        assert tokens <= max(MIN_TOKENS, 2 * largest)
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


def test_budget_follows_a_machine_that_became_slower() -> None:
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


def test_rate_of_urgent_prompts_is_that_of_steps_as_long_as_the_target() -> None:
    budget = learned(StepBudget(), target_s=0.050)
    free, urgent = (budget.rates(512, target_s).beside_tokens_per_s for target_s in (0.0, 0.050))
    assert free is not None and urgent is not None and 8 * free < urgent < 300 / 0.050


def test_rate_next_to_answers_is_below_the_rate_without_them_although_few_tokens_cost_little() -> None:
    budget = learned(StepBudget(), token_s=TOKEN_S / 10)
    alone = 0.5 / TOKEN_S
    for _ in range(10):
        budget.observe(0, 512, 512 / alone)
    for target_s in (0.0, 0.050, 10.0):
        found = budget.rates(512, target_s).beside_tokens_per_s
        assert found is not None and found < alone


def test_step_without_answers_is_short_enough_for_a_prompt_that_arrives_meanwhile() -> None:
    budget = StepBudget()
    assert budget.alone_tokens(512) == 512, "nothing is known"
    budget.observe(0, 512, 1.0)
    assert budget.alone_tokens(512) == pytest.approx(512 * MAX_ALONE_S, abs=1)
    budget.observe(0, 512, 100.0)
    assert budget.alone_tokens(512) == MIN_ALONE_TOKENS


def test_token_cost_is_the_slope_and_its_error_on_the_safe_side() -> None:
    """Ten tokens took 10 ms more; a measurement is right to 1 % of a step of 100 ms, so 1 ms."""
    cost = PrefillTokenCost()
    assert cost.seconds is None
    cost.observe(10, 0.010, own_s=0.100, error=0.01)
    assert cost.seconds == pytest.approx(0.001 + 0.0001 * SAFETY_SIGMAS)
    cost.scale(3.0)
    assert cost.seconds == pytest.approx(0.003 + 0.0001 * SAFETY_SIGMAS)


def test_one_step_counts_for_no_more_than_a_quarter_of_its_own_cost_beyond_the_expected() -> None:
    for extra_s, counted_s in ((9.0, MAX_EXTRA_SHARE * 0.100), (-9.0, -MAX_EXTRA_SHARE * 0.100)):
        cost = PrefillTokenCost()
        cost.observe(10, extra_s, own_s=0.100, error=0.01)
        assert cost.seconds == pytest.approx(max(0.0, counted_s / 10) + 0.0001 * SAFETY_SIGMAS)
    cost.observe(10, 0.0, own_s=0.100, error=0.01)
    assert cost.seconds is not None and cost.seconds > 0.0, "no token is free"


def test_prompt_alone_is_believed_from_some_tokens_on_until_steps_beside_answers_are_known() -> None:
    cost = PrefillTokenCost()
    cost.expect(MIN_PRIOR_TOKENS - 1, 1.0)
    assert cost.seconds is None
    cost.expect(MIN_PRIOR_TOKENS, 0.160)
    assert cost.seconds == pytest.approx(0.010 * (1 + SAFETY_SIGMAS * PRIOR_ERROR))
    for _ in range(40):
        cost.observe(10, 0.010, own_s=0.100, error=0.01)
    assert cost.is_sure
    before = cost.seconds
    cost.expect(1000, 100.0)
    assert cost.seconds == before


def test_cost_is_sure_after_so_many_steps_of_late() -> None:
    cost, steps = PrefillTokenCost(), 0
    while not cost.is_sure:
        cost.observe(10, 0.010, own_s=0.100, error=0.01)
        steps += 1
    assert steps == 18, "each step makes those before count a hundredth less: 17 are worth 15.7"


def test_few_steps_of_urgent_prompts_miss_the_objective_on_a_noisy_machine() -> None:
    budget, draw, missed = StepBudget(), random.Random(3), 0
    for number in range(6000):
        tokens = budget.prompt_tokens(4, most=512, target_s=0.050)
        seconds = (OWN_S + TOKEN_S * tokens) * draw.gauss(1.0, 0.08)
        budget.observe(4, tokens, seconds)
        missed += number > 1000 and seconds > 0.050
    assert missed <= 0.02 * 5000


def test_drafting_takes_its_time_from_the_target() -> None:
    budget = learned(StepBudget(), target_s=0.050)
    budget.observe(4, 0, OWN_S)
    alone, beside = (budget.prompt_tokens(4, 512, beside_s, target_s=0.050) for beside_s in (0.0, 0.010))
    assert alone - beside == pytest.approx(0.010 / TOKEN_S, rel=0.15)


def test_chunk_is_at_most_twice_the_largest_of_late() -> None:
    budget = learned(StepBudget(), steps=60, target_s=10.0)
    for _ in range(PROBE_EVERY):
        budget.observe(4, 0, OWN_S)
    budget._largest = 7.0
    assert budget.prompt_tokens(4, most=512, target_s=10.0) == 14
    budget.observe(0, 512, 0.1)
    assert budget._largest == pytest.approx(51.2), "a tenth of a chunk without answers"
    budget.observe(4, 3, OWN_S)
    assert budget._largest == pytest.approx(0.98 * 51.2)


def test_number_of_answers_between_measured_ones_needs_no_measurement() -> None:
    budget = learned(StepBudget())
    budget.observe(8, 0, 1.2 * OWN_S)
    budget.observe(4, 3, OWN_S)
    assert budget.prompt_tokens(6, most=512) > 0
    assert budget.prompt_tokens(9, most=512) == 0
