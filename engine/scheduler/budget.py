"""How many prompt tokens a step may compute beside running answers, by the measured times of steps. Pure.

A step with prompt tokens aims at SHARE (5 %) more time than it would take without them, however many wait, and is
promised to take no more than PROMISED_SHARE (10 %) more; or, where there is a target, at most that long.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

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
    """The time of steps without prompt tokens, by how many answers are in them: learned from recent steps.

    Other numbers of answers than those that were measured lately are bounded by their neighbours: more answers never
    take less time, and never more than in proportion.
    """

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


LONG, SHORT = 0.99, 0.85  # weight of a step against the one after it: about the last 100, or 7, count
CARE = 1.0  # standard errors on the safe side of the long fit
CONTRADICTION = 3.0  # standard errors of the short fit
CAP = 0.25  # of a step's own cost: so much more than twice the expected time is a disturbance, at most so much is taken
SURE = 16.0  # steps
EXPECTED_FROM, EXPECTED_ERROR = 16, 0.25  # tokens of a step without answers, and the share by which they may mislead


class _Fit:
    """Least squares through the origin, older steps counting less."""

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
    """The time that a prompt token adds to a step: fitted to the times of such steps beyond their own cost.

    There are two fits through the origin, of long and of short memory. The long one is believed, as far as the short
    one does not contradict it: so the cost is steady under noise, and follows a machine that has changed. Both have a
    standard error.
    """

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


PROMISED_SHARE = 0.10  # of the time of a step without prompt tokens: none takes longer by more, tests hold it
SHARE = PROMISED_SHARE / 2  # is aimed at: the promise holds where a token costs up to twice the learned cost
AIM = 0.95  # of a given target, since learned costs are wrong by some hundredths
PROBE_EVERY = 8  # steps, one has no prompt token: answers grow, come and go, and so do other processes
LEAST_TOKENS = 1  # of other steps: a prompt advances at least as an answer would, so that it ends
BELIEVED = 2.0  # times the largest chunk of late
FADING = 0.98  # of that, per step
ALONE_FADING = 0.9
ALONE_BELIEVED = 0.1  # of a chunk without answers: as if one of that size had been measured beside answers


class PromptRates(NamedTuple):
    """Prompt tokens per second. None: not measured, or not well enough."""

    alone_tokens_per_s: float | None  # while no answer runs
    beside_tokens_per_s: float | None  # while answers run


class StepBudget:
    """`target_s`: the time that a step with prompt tokens may take, seconds. None: SHARE more than without them.

    The time without them is measured: one step in every PROBE_EVERY has none.
    """

    def __init__(self, target_s: float | None = None) -> None:
        if target_s is not None and target_s <= 0:
            raise ValueError(f"the target is {target_s} s; it must be positive")
        self._target_s = target_s
        self._own = OwnCost()
        self._token = TokenCost()
        self._unsettled: list[tuple[int, int, float]] = []  # steps since the last without prompt tokens
        self._largest = 0.0  # chunk of late, in tokens
        self._answers = 0  # of the last step that had any
        self._alone_tokens = self._alone_s = 0.0

    def observe(self, answers: int, prompt_tokens: int, seconds: float) -> None:
        """A step of so many answers' tokens, and so many of prompts, took so long."""
        if answers == 0:
            self._alone_tokens = ALONE_FADING * self._alone_tokens + prompt_tokens
            self._alone_s = ALONE_FADING * self._alone_s + seconds
            self._token.expect(prompt_tokens, seconds)
            self._largest = max(self._largest, ALONE_BELIEVED * prompt_tokens)
            return
        self._answers = answers
        if prompt_tokens:
            self._unsettled.append((answers, prompt_tokens, seconds))
            self._largest = max(FADING * self._largest, prompt_tokens)
            return
        change = self._own.observe(answers, seconds)
        if change != 1.0:
            self._token.scale(change)
        if change == 1.0 and not self._own.in_doubt:
            self._settle()
        self._unsettled.clear()

    def prompt_tokens(self, answers: int, most: int, beside_s: float = 0.0) -> int:
        """How many the next step may have beside so many answers, at most `most`; 0 where it is to be measured.

        `beside_s`: of the target, that something else takes.
        """
        measured = not self._unsettled  # the last step with answers had no prompt token
        own = self._own.expected(answers)
        if own is None or len(self._unsettled) >= PROBE_EVERY - 1:
            return 0
        if self._own.in_doubt or not (measured or self._own.covers(answers)):
            return 0
        allowed = min(self._affordable(own, beside_s), BELIEVED * self._largest)
        return min(most, max(LEAST_TOKENS, int(allowed)))

    def rates(self, most: int) -> PromptRates:
        """In steps of at most `most` tokens, beside as many answers as ran last."""
        alone = self._alone_tokens / self._alone_s if self._alone_s > 0.0 else 0.0
        return PromptRates(alone or None, self._beside_tokens_per_s(most))

    def _beside_tokens_per_s(self, most: int) -> float | None:
        own, cost = self._own.expected(self._answers), self._token.seconds
        if own is None or cost is None or not self._token.is_sure:
            return None
        tokens = min(max(float(LEAST_TOKENS), self._affordable(own)), max(LEAST_TOKENS, most - self._answers))
        share = (PROBE_EVERY - 1) / PROBE_EVERY
        return share * tokens / (own.least_s + share * tokens * cost)

    def _affordable(self, own: Bounds, beside_s: float = 0.0) -> float:
        cost = self._token.seconds
        if cost is None:
            return LEAST_TOKENS
        extra_s = SHARE * own.least_s
        if self._target_s is not None:
            extra_s = max(extra_s, AIM * self._target_s - own.most_s - beside_s)
        return extra_s / cost

    def _settle(self) -> None:
        """Compares the steps with prompt tokens with the known costs: measurements from before and after them."""
        for answers, tokens, seconds in self._unsettled:
            own = self._own.known(answers)
            if own is not None:
                # The cost that they are compared with is wrong for all of them alike: its error does not average out.
                error = math.sqrt(self._own.noise**2 + (PROBE_EVERY - 1) * own.error**2)
                self._token.observe(tokens, seconds - own.seconds, own.seconds, error)
