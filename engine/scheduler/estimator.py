"""Running estimates of step times by number of rows, without a clock."""

from dataclasses import dataclass


@dataclass(slots=True)
class Estimate:
    seconds: float
    last: int  # sequence number of the newest measurement
    times: int = 1  # number of measurements


class OnlineEstimator:
    """Mean step time by number of rows: plain average at first, later an exponential average with `weight`.

    An estimate is forgotten if the last `forget_after` measurements were all of other numbers of rows. With
    `forget_after_each`, an estimate from n measurements is forgotten after n * `forget_after_each` such measurements
    if that is earlier.
    """

    def __init__(self, weight: float, forget_after: int, forget_after_each: int | None = None) -> None:
        self.estimates: dict[int, Estimate] = {}  # by number of rows
        self._weight = weight
        self._forget_after, self._forget_after_each = forget_after, forget_after_each
        self._number = 0

    def advance(self) -> None:
        """Age all estimates by one measurement, even if no `add` follows."""
        self._number += 1

    def add(self, rows: int, seconds: float) -> None:
        """Average `seconds` into the estimate of `rows`."""
        estimate = self.estimates.get(rows)
        if estimate is None:
            self.estimates[rows] = Estimate(seconds, self._number)
            return
        estimate.times, estimate.last = estimate.times + 1, self._number
        estimate.seconds += max(self._weight, 1.0 / estimate.times) * (seconds - estimate.seconds)

    def forget_old(self) -> None:
        self.estimates = {rows: each for rows, each in self.estimates.items() if not self._is_old(each)}

    def scale(self, ratio: float) -> None:
        """Multiply all estimates by `ratio`. Each estimate then weighs as much as one measurement."""
        for each in self.estimates.values():
            each.seconds, each.times = each.seconds * ratio, 1

    def variance_share(self, rows: int) -> float:
        """Return the variance of the estimate of `rows`, as a fraction of the variance of one measurement."""
        estimate = self.estimates.get(rows)
        return 1.0 if estimate is None else max(1.0 / estimate.times, self._weight / (2.0 - self._weight))

    def _is_old(self, estimate: Estimate) -> bool:
        age, each = self._number - estimate.last, self._forget_after_each
        return age >= (self._forget_after if each is None else min(self._forget_after, each * estimate.times))
