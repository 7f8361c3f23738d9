"""Statistics of benchmarks: percentiles, worst parts, means of ratios, fitted lines. No I/O, no clock."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and the interval that it lies in with 95 % confidence."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Line:
    """y = intercept + slope * x, by least squares. `r_squared`: the share of y's variance that it explains."""

    slope: float
    intercept: float
    r_squared: float

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x


def percentile(values: Sequence[float], percent: float) -> float:
    """Between neighbours in proportion, as numpy's default. `percent`: 0 to 100. Raises: ValueError without values."""
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"no percentile {percent} of {len(values)} values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(values: Sequence[float]) -> float:
    """Raises: ValueError without values."""
    return percentile(values, 50)


def mean_of_worst(values: Sequence[float], share: float = 0.1) -> float:
    """Mean of the largest values: `share` of them, at least one. Raises: ValueError without values."""
    if not values:
        raise ValueError("no values")
    count = max(1, round(len(values) * share))
    return math.fsum(sorted(values)[-count:]) / count


def geometric_mean(ratios: Sequence[float]) -> float:
    """Raises: ValueError without ratios, or where one is not positive."""
    if not ratios or min(ratios) <= 0:
        raise ValueError(f"no geometric mean of {list(ratios)}")
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios))


def mean_ratio(ratios: Sequence[float], seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """Geometric mean; its interval by the bootstrap (percentiles of the means of resampled rounds), the same each time.

    Of few rounds the interval is on the narrow side, and of one round a point. Raises: ValueError as `geometric_mean`.
    """
    middle = geometric_mean(ratios)
    draw = random.Random(seed)
    logs = [math.log(ratio) for ratio in ratios]
    means = [math.fsum(draw.choices(logs, k=len(logs))) / len(logs) for _ in range(resamples)]
    return Estimate(middle, math.exp(percentile(means, 2.5)), math.exp(percentile(means, 97.5)))


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """Raises: ValueError for fewer than two different x."""
    if len(xs) != len(ys) or len(set(xs)) < 2:
        raise ValueError("a line takes as many y as x, and two different x")
    x_mean, y_mean = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    spread = math.fsum((x - x_mean) ** 2 for x in xs)
    slope = math.fsum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread
    intercept = y_mean - slope * x_mean
    variance = math.fsum((y - y_mean) ** 2 for y in ys)
    missed = math.fsum((y - intercept - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    return Line(slope, intercept, 1 - missed / variance if variance else 1.0)
