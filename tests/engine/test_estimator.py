"""Running estimates of step times."""

import pytest

from baton.engine.scheduler.estimator import OnlineEstimator


def estimator_after(*steps: tuple[int, float], forget_after_each: int | None = None) -> OnlineEstimator:
    estimator = OnlineEstimator(0.25, 8, forget_after_each)
    for rows, seconds in steps:
        estimator.advance()
        estimator.add(rows, seconds)
        estimator.forget_old()
    return estimator


def test_add_first_measurements_weigh_the_same_and_later_ones_their_weight() -> None:
    assert estimator_after((4, 1.0), (4, 1.1), (4, 1.2)).estimates[4].seconds == pytest.approx(1.1)
    assert estimator_after(*[(4, 1.0)] * 6, (4, 1.1)).estimates[4].seconds == pytest.approx(1.025)


@pytest.mark.parametrize(("later", "is_kept"), [(7, True), (8, False)])
def test_estimate_is_forgotten_after_measurements_of_other_rows(later: int, is_kept: bool) -> None:
    assert (4 in estimator_after((4, 1.0), *[(8, 1.0)] * later).estimates) is is_kept


@pytest.mark.parametrize(("times", "later", "is_kept"), [(1, 1, True), (1, 2, False), (2, 3, True), (9, 8, False)])
def test_estimate_with_few_measurements_is_forgotten_sooner(times: int, later: int, is_kept: bool) -> None:
    steps = [*[(4, 1.0)] * times, *[(8, 1.0)] * later]
    assert (4 in estimator_after(*steps, forget_after_each=2).estimates) is is_kept


def test_scale_multiplies_estimates_and_lets_the_next_measurement_weigh_half() -> None:
    estimator = estimator_after(*[(4, 1.0)] * 6)
    estimator.scale(3.0)
    estimator.add(4, 4.0)
    assert estimator.estimates[4].seconds == pytest.approx(3.5)


@pytest.mark.parametrize(("times", "share"), [(1, 1.0), (4, 0.25), (50, 0.25 / 1.75)])
def test_variance_share_falls_with_measurements_as_far_as_their_weight_allows(times: int, share: float) -> None:
    assert estimator_after(*[(4, 1.0)] * times).variance_share(4) == pytest.approx(share)
