"""What benchmarks make of their numbers, against figures worked out by hand or by numpy."""

import math
import random

import numpy
import pytest

from baton.lab.report.statistics import fit_line, mean_of_worst, mean_ratio, percentile


def test_percentiles_are_numpys() -> None:
    draw = random.Random(1)
    values = [draw.random() for _ in range(37)]
    for percent in (0, 1, 50, 90, 99, 99.9, 100):
        assert percentile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)))


def test_worst_tenth_is_the_largest_and_never_empty() -> None:
    assert mean_of_worst([float(value) for value in range(20)]) == 18.5
    assert mean_of_worst([3.0, 7.0]) == 7.0


def test_ratios_that_cancel_have_mean_one() -> None:
    assert mean_ratio([0.5, 2.0, 4.0, 0.25]).middle == pytest.approx(1.0)
    with pytest.raises(ValueError, match="geometric"):
        mean_ratio([1.0, 0.0])


def test_interval_holds_the_mean_narrows_with_rounds_and_repeats() -> None:
    draw = random.Random(2)
    ratios = [math.exp(draw.gauss(0.2, 0.1)) for _ in range(64)]
    few, many = mean_ratio(ratios[:8]), mean_ratio(ratios)
    assert few.low < few.middle < few.high
    assert many.high - many.low < few.high - few.low
    assert many == mean_ratio(ratios)
    # Three standard errors of a normal mean, on either side.
    assert many.low == pytest.approx(many.middle * math.exp(-1.96 * 0.1 / 8), rel=0.03)


def test_fitted_line_is_distinguished_from_noise() -> None:
    line = fit_line([1.0, 2.0, 4.0], [5.0, 7.0, 11.0])
    assert (line.slope, line.intercept, line.r_squared) == pytest.approx((2.0, 3.0, 1.0))
    assert line.at(10.0) == pytest.approx(23.0)
    assert fit_line([1.0, 2.0, 3.0, 4.0], [1.0, -1.0, 1.0, -1.0]).r_squared < 0.3
    with pytest.raises(ValueError, match="two different"):
        fit_line([1.0, 1.0], [1.0, 2.0])
