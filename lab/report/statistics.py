"""Statistics of benchmarks: percentiles, medians, mean of the worst, mean ratios, fitted lines. Pure."""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Figures = TypeVar("Figures", bound="DataclassInstance")
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class MeanEstimate:
    """Estimate with its 95 % confidence interval."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Line:
    """Least-squares line y = intercept + slope * x. `r_squared`: share of y's variance that it explains."""

    slope: float
    intercept: float
    r_squared: float

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolate a percentile. `percent`: 0 to 100. Raises: ValueError without values."""
    if not values:
        raise ValueError(f"no percentile {percent} of 0 values")
    return float(np.percentile(values, percent))


def medians(rounds: Sequence[Figures]) -> Figures:
    """Return the median of each figure over the rounds that have it, None where none has. Raises: ValueError without
    rounds.
    """
    if not rounds:
        raise ValueError("medians need at least one round")
    columns = ([getattr(each, figure.name) for each in rounds] for figure in fields(rounds[0]))
    return type(rounds[0])(*map(_median, columns))


def _median(values: Sequence[Any]) -> Any:
    there = [value for value in values if value is not None]
    if there and is_dataclass(there[0]):
        return medians(there)
    return statistics.median(there) if there else None


def mean_of_worst(values: Sequence[float], share: float = 0.1) -> float:
    """Return the mean of the fraction `share` of largest values, at least one. Raises: ValueError without values."""
    if not values:
        raise ValueError("the mean of the largest values needs at least one value")
    count = max(1, round(len(values) * share))
    return math.fsum(sorted(values)[-count:]) / count


def mean_ratio(ratios: Sequence[float], seed: int = 0, resamples: int = RESAMPLES) -> MeanEstimate:
    """Return the geometric mean with a bootstrap interval (seeded). The interval is narrow for few rounds.

    Raises: ValueError without ratios, or if one is not positive.
    """
    middle = statistics.geometric_mean(ratios)
    draw = random.Random(seed)
    logs = [math.log(ratio) for ratio in ratios]
    means = [math.fsum(draw.choices(logs, k=len(logs))) / len(logs) for _ in range(resamples)]
    return MeanEstimate(middle, math.exp(percentile(means, 2.5)), math.exp(percentile(means, 97.5)))


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """Fit a line. Raises: ValueError for fewer than two different x."""
    if len(xs) != len(ys) or len(set(xs)) < 2:
        raise ValueError("a line needs as many y as x values, and two different x values")
    slope, intercept = statistics.linear_regression(xs, ys)
    r_squared = statistics.correlation(xs, ys) ** 2 if len(set(ys)) > 1 else 1.0
    return Line(slope, intercept, r_squared)
