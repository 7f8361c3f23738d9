"""What steps without prompt tokens take."""

import pytest

from baton.engine.scheduler.budget import CLOSE_RATIO, EWMA_WEIGHT, INITIAL_NOISE, OUTLIER_RATIO, DecodeStepCost


def measured(*steps: tuple[int, float]) -> DecodeStepCost:
    own = DecodeStepCost()
    for answers, seconds in steps:
        own.observe(answers, seconds)
    return own


def bounds(own: DecodeStepCost, answers: int) -> tuple[float, float]:
    expected = own.expected(answers)
    assert expected is not None
    return expected.least_s, expected.most_s


def test_nothing_is_expected_before_the_first_step() -> None:
    assert DecodeStepCost().expected(1) is None
    assert DecodeStepCost().estimate(1) is None


def test_newer_steps_count_for_more() -> None:
    own = measured(*[(4, 1.0)] * 20, *[(4, 1.1)] * 8)
    assert bounds(own, 4)[0] == pytest.approx(1.1 - 0.1 * (1 - EWMA_WEIGHT) ** 8)


def test_unmeasured_batch_sizes_are_interpolated() -> None:
    own = measured((4, 1.0), (8, 1.5))
    assert bounds(own, 6) == pytest.approx((1.125, 1.5))
    assert bounds(own, 2) == pytest.approx((0.5, 1.0))
    assert bounds(own, 16) == pytest.approx((1.5, 3.0))
    assert (own.covers(4), own.covers(6), own.covers(2), own.covers(16)) == (True, True, False, False)


def test_only_close_bounds_are_as_good_as_a_measurement() -> None:
    own = measured((4, 1.0), (8, 1.6))
    assert own.estimate(6) is None
    assert own.estimate(4) is not None


def test_disturbance_counts_for_nothing() -> None:
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


@pytest.mark.parametrize(
    ("ratio", "in_doubt"),
    [(OUTLIER_RATIO, False), (OUTLIER_RATIO + 0.01, True), (1 / OUTLIER_RATIO, False), (0.79, True)],
)
def test_measurement_is_odd_beyond_the_bound_in_either_direction(ratio: float, in_doubt: bool) -> None:
    assert measured((4, 1.0), (4, ratio)).in_doubt is in_doubt


def test_odd_steps_in_two_directions_are_two_disturbances() -> None:
    own = measured((4, 1.0), (4, 3.0))
    assert own.observe(4, 0.3) == 1.0
    assert own.in_doubt and bounds(own, 4) == (1.0, 1.0)
    assert own.observe(4, 0.4) == pytest.approx(0.4), "the second one like it is a change"
    assert not own.in_doubt


@pytest.mark.parametrize(
    ("first", "second", "change"), [(3.0, 2.0, 2.0), (2.0, 3.0, 2.0), (0.3, 0.5, 0.5), (0.5, 0.3, 0.5)]
)
def test_change_of_all_steps_is_the_lesser_of_the_two_that_showed_it(
    first: float, second: float, change: float
) -> None:
    own = measured((4, 1.0), (8, 1.5), (4, first))
    assert own.observe(4, second) == pytest.approx(change)
    assert bounds(own, 8)[0] == pytest.approx(1.5 * change)


@pytest.mark.parametrize(("most_s", "is_known"), [(CLOSE_RATIO, True), (CLOSE_RATIO + 0.001, False)])
def test_bounds_are_as_good_as_a_measurement_up_to_a_tenth_apart(most_s: float, is_known: bool) -> None:
    known = measured((4, 1.0), (8, most_s)).estimate(6)
    assert (known is not None) is is_known
    assert known is None or (known.seconds, known.error) == pytest.approx(((1.0 + CLOSE_RATIO) / 2, INITIAL_NOISE))


@pytest.mark.parametrize(("times", "share"), [(1, 1.0), (4, 0.25), (100, EWMA_WEIGHT / (2.0 - EWMA_WEIGHT))])
def test_error_falls_with_measurements_as_far_as_their_weight_allows(times: int, share: float) -> None:
    own = measured(*[(4, 1.0)] * times)
    known = own.estimate(4)
    assert known is not None and known.error == pytest.approx(own.noise * share**0.5)


def test_more_answers_take_no_less_time_and_no_more_than_in_proportion() -> None:
    assert bounds(measured((4, 1.0), (8, 1.5), (16, 2.0)), 12) == pytest.approx((1.5, 2.0))
    assert bounds(measured((4, 1.0), (16, 3.0)), 8) == pytest.approx((1.5, 2.0)), "half of 16's, twice 4's"


def test_noise_is_learned() -> None:
    own = measured(*[(4, 1.0 + 0.1 * (-1) ** number) for number in range(200)])
    assert own.noise == pytest.approx(0.1, rel=0.3)
    assert measured(*[(4, 1.0)] * 200).noise == pytest.approx(0.01)


def test_bounds_that_noise_has_crossed_are_still_in_order() -> None:
    """Eight answers took less than four: six are between what both say."""
    assert bounds(measured((4, 1.0), (8, 0.9)), 6) == pytest.approx((0.9, 1.0))
