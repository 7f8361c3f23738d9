"""What steps without prompt tokens take."""

import pytest

from baton.engine.scheduler.budget import KEPT, WEIGHT, OwnCost


def measured(*steps: tuple[int, float]) -> OwnCost:
    own = OwnCost()
    for answers, seconds in steps:
        own.observe(answers, seconds)
    return own


def bounds(own: OwnCost, answers: int) -> tuple[float, float]:
    expected = own.expected(answers)
    assert expected is not None
    return expected.least_s, expected.most_s


def test_nothing_is_expected_before_the_first_step() -> None:
    assert OwnCost().expected(1) is None
    assert OwnCost().known(1) is None


def test_newer_steps_count_for_more() -> None:
    own = measured(*[(4, 1.0)] * 20, *[(4, 1.1)] * 8)
    assert bounds(own, 4)[0] == pytest.approx(1.1 - 0.1 * (1 - WEIGHT) ** 8)


def test_other_numbers_of_answers_lie_between_those_measured() -> None:
    own = measured((4, 1.0), (8, 1.5))
    assert bounds(own, 6) == pytest.approx((1.125, 1.5))
    assert bounds(own, 2) == pytest.approx((0.5, 1.0))
    assert bounds(own, 16) == pytest.approx((1.5, 3.0))
    assert (own.covers(4), own.covers(6), own.covers(2), own.covers(16)) == (True, True, False, False)


def test_only_close_bounds_are_as_good_as_a_measurement() -> None:
    own = measured((4, 1.0), (8, 1.6))
    assert own.known(6) is None
    assert own.known(4) is not None


def test_a_disturbance_counts_for_nothing() -> None:
    own = measured((4, 1.0), (4, 1.0), (4, 30.0))
    assert own.in_doubt
    assert bounds(own, 4) == (1.0, 1.0)
    own.observe(4, 1.0)
    assert not own.in_doubt


@pytest.mark.parametrize("ratio", [3.0, 0.4])
def test_two_odd_steps_in_one_direction_are_a_change_of_all(ratio: float) -> None:
    own = measured((4, 1.0), (8, 1.5), (8, 1.5 * ratio))
    assert own.observe(8, 1.5 * ratio) == pytest.approx(ratio)
    assert bounds(own, 8)[0] == pytest.approx(1.5 * ratio)
    assert bounds(own, 4)[0] == pytest.approx(ratio)


def test_what_was_measured_long_ago_is_forgotten() -> None:
    own = measured((4, 1.0), *[(8, 1.5)] * KEPT)
    assert not own.covers(4)


def test_noise_is_learned() -> None:
    own = measured(*[(4, 1.0 + 0.1 * (-1) ** number) for number in range(200)])
    assert own.noise == pytest.approx(0.1, rel=0.3)
    assert measured(*[(4, 1.0)] * 200).noise == pytest.approx(0.01)
