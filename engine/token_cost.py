"""The time that a prompt token adds to a step: fitted to the times of such steps beyond their own cost. Pure.

Two fits through the origin, of long and of short memory. The long one is believed, as far as the short one does not
contradict it: so the cost is steady under noise, and follows a machine that has changed. Both have a standard error.
"""

import math

LONG, SHORT = 0.99, 0.85  # weight of a step against the one after it: about the last 100, or 7, count
CARE = 1.0  # standard errors on the safe side of the long fit
CONTRADICTION = 3.0  # standard errors of the short fit
CAP = 0.25  # of a step's own cost: so much more than twice the expected time is a disturbance, at most so much is taken
SURE = 16.0  # steps
EXPECTED_FROM, EXPECTED_ERROR = 16, 0.25  # tokens of a step without answers, and the share by which they may mislead


class _Fit:
    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.squares = self.products = self._certainty = 0.0

    def add(self, tokens: int, seconds: float, error_s: float) -> None:
        """`error_s`: the standard error of this measurement; it counts the more the surer it is."""
        weight, decay = 1.0 / error_s**2, self._decay
        self.squares = decay * self.squares + weight * tokens * tokens
        self.products = decay * self.products + weight * tokens * seconds
        self._certainty = decay * decay * self._certainty + weight * tokens * tokens

    @property
    def slope(self) -> float:
        return self.products / self.squares

    @property
    def error(self) -> float:
        """Standard error of the slope."""
        return math.sqrt(self._certainty) / self.squares


class TokenCost:
    def __init__(self) -> None:
        self._long, self._short = _Fit(LONG), _Fit(SHORT)
        self._steps = 0.0

    @property
    def is_sure(self) -> bool:
        """Enough steps were measured to report the cost."""
        return self._steps >= SURE

    def observe(self, tokens: int, extra_s: float, own_s: float, error: float) -> None:
        """A step with so many prompt tokens took so much longer than its own cost; `error`: standard error of that, as
        a share of the step.
        """
        expected_s = max(0.0, self._long.slope, self._short.slope) * tokens if self._steps else 0.0
        extra_s = min(max(extra_s, -CAP * own_s), CAP * own_s + 2.0 * expected_s)
        error_s = error * (own_s + expected_s)
        for fit in (self._long, self._short):
            fit.add(tokens, extra_s, error_s)
        self._steps = LONG * self._steps + 1.0

    def expect(self, tokens: int, seconds: float) -> None:
        """So many prompt tokens took so long where no answer ran: about their time in a step with answers too."""
        if self.is_sure or tokens < EXPECTED_FROM:
            return
        for fit in (self._long, self._short):
            fit.add(tokens, seconds, EXPECTED_ERROR * seconds)
        self._steps = max(self._steps, LONG)

    def scale(self, ratio: float) -> None:
        """Steps take so many times as long as before: their prompt tokens too, until it is known better."""
        for fit in (self._long, self._short):
            fit.products *= ratio

    @property
    def seconds(self) -> float | None:
        """Of one more token, on the safe side; never 0. None: not known at all."""
        if not self._steps:
            return None
        long, short = self._long, self._short
        return max(max(0.0, long.slope) + CARE * long.error, short.slope - CONTRADICTION * short.error)
