"""The time of steps without prompt tokens, by how many answers are in them: learned from recent steps. Pure.

Other numbers of answers than those that were measured lately are bounded by their neighbours: more answers never take
less time, and never more than in proportion.
"""

import math
from dataclasses import dataclass

WEIGHT = 0.25  # of a new measurement of one number of answers: about the last seven count, as contexts grow
KEPT = 32  # measurements later one of another number of answers is forgotten
ODD = 1.25  # times longer or shorter than expected: a disturbance, or a change if the next one is alike
CLOSE = 1.1  # bounds that differ by no more are as good as a measurement
NOISE = 0.05  # of a step, as its share, before anything is known
LEAST_NOISE = 0.01


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of a step, seconds. Equal where so many answers were measured lately."""

    least_s: float
    most_s: float


@dataclass(frozen=True, slots=True)
class Known:
    seconds: float
    error: float  # standard error, as a share


@dataclass(slots=True)
class _Seen:
    seconds: float
    number: int  # of the last measurement
    times: int = 1  # that it was measured


class OwnCost:
    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}  # by answers
        self._number = 0
        self._odd_ratio = 1.0  # of the last measurement, where that was odd
        self._variance = NOISE**2

    @property
    def noise(self) -> float:
        """Standard deviation of a step, as a share of it."""
        return max(LEAST_NOISE, math.sqrt(self._variance))

    @property
    def in_doubt(self) -> bool:
        """The last measurement was odd: another one will show whether steps have changed."""
        return self._odd_ratio != 1.0

    def known(self, answers: int) -> Known | None:
        """Of a step where so many answers were measured lately, or nearly as many."""
        expected, seen = self.expected(answers), self._seen.get(answers)
        if expected is None or expected.most_s > CLOSE * expected.least_s:
            return None
        share = 1.0 if seen is None else max(1.0 / seen.times, WEIGHT / (2.0 - WEIGHT))  # of the variance of a step
        return Known((expected.least_s + expected.most_s) / 2, self.noise * math.sqrt(share))

    def covers(self, answers: int) -> bool:
        """Whether so many were measured lately, or both more and fewer."""
        return answers in self._seen or (bool(self._seen) and min(self._seen) < answers < max(self._seen))

    def observe(self, answers: int, seconds: float) -> float:
        """A step took so long. Returns how many times longer all steps are now taken to be than before it: mostly 1."""
        self._number += 1
        expected = self.expected(answers)
        if expected is None:
            self._seen[answers] = _Seen(seconds, self._number)
            return 1.0
        ratio = seconds / expected.least_s if seconds < expected.least_s else max(1.0, seconds / expected.most_s)
        was_odd, is_odd = self._odd_ratio, not 1 / ODD <= ratio <= ODD
        self._odd_ratio = ratio if is_odd else 1.0
        change = 1.0
        if is_odd:
            if was_odd == 1.0 or (ratio > 1.0) != (was_odd > 1.0):
                return 1.0  # a disturbance counts for nothing
            change, self._odd_ratio = min(ratio, was_odd) if ratio > 1.0 else max(ratio, was_odd), 1.0
            for seen in self._seen.values():
                seen.seconds, seen.times = seen.seconds * change, 1
        elif answers in self._seen:
            self._variance += (WEIGHT / 4) * ((ratio - 1.0) ** 2 - self._variance)
        self._take(answers, seconds)
        return change

    def expected(self, answers: int) -> Bounds | None:
        """None: nothing was measured yet."""
        known = self._seen.get(answers)
        if known is not None:
            return Bounds(known.seconds, known.seconds)
        if not self._seen:
            return None
        fewer = [(count, seen.seconds) for count, seen in self._seen.items() if count < answers]
        more = [(count, seen.seconds) for count, seen in self._seen.items() if count > answers]
        least = [seconds for _, seconds in fewer] + [seconds * answers / count for count, seconds in more]
        most = [seconds for _, seconds in more] + [seconds * answers / count for count, seconds in fewer]
        return Bounds(min(max(least), min(most)), max(max(least), min(most)))

    def _take(self, answers: int, seconds: float) -> None:
        seen = self._seen.get(answers)
        if seen is None:
            self._seen[answers] = _Seen(seconds, self._number)
        else:
            seen.times, seen.number = seen.times + 1, self._number
            seen.seconds += max(WEIGHT, 1.0 / seen.times) * (seconds - seen.seconds)
        if len(self._seen) > 1:
            self._seen = {count: each for count, each in self._seen.items() if self._number - each.number < KEPT}
