"""Running estimates of step times by number of rows, without a clock."""

from dataclasses import dataclass


@dataclass(slots=True)
class Estimate:
    seconds: float
    last: int  # number of the newest measurement
    times: int = 1  # number of measurements


class OnlineEstimator:
    """Mean step time by number of rows. Its first measurements weigh the same, later ones `weight` each.

    An estimate is forgotten when `forget_after` measurements of any numbers of rows have followed its last one. With
    `forget_after_each`, an estimate from n measurements is forgotten after n * `forget_after_each` at the latest.
    """

    def __init__(self, weight: float, forget_after: int, forget_after_each: int | None = None) -> None:
        self.estimates: dict[int, Estimate] = {}  # by number of rows
        self._weight = weight
        self._forget_after, self._forget_after_each = forget_after, forget_after_each
        self._number = 0

    def advance(self) -> None:
        """Count a measurement towards the age of all estimates, whether or not it is added to one."""
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
        """Multiply all estimates by `ratio`; each counts as measured once."""
        for each in self.estimates.values():
            each.seconds, each.times = each.seconds * ratio, 1

    def variance_share(self, rows: int) -> float:
        """Return the variance of the estimate of `rows`, as a fraction of the variance of one measurement."""
        estimate = self.estimates.get(rows)
        return 1.0 if estimate is None else max(1.0 / estimate.times, self._weight / (2.0 - self._weight))

    def _is_old(self, estimate: Estimate) -> bool:
        age, each = self._number - estimate.last, self._forget_after_each
        return age >= (self._forget_after if each is None else min(self._forget_after, each * estimate.times))
