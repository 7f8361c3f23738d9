"""Number of prompt tokens that a step may compute next to running answers, learned from measured step times. Pure.

A step with prompt tokens aims at 5 % (TARGET_SHARE) more time than it would take without them, however many prompts
wait, and may take at most 10 % (PROMISED_SHARE) more. An urgent prompt (prompt_order.py) may lengthen a step up to the
TBT objective of its answers; an objective below the 5 % changes nothing.
"""

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from baton.engine.scheduler.estimator import OnlineEstimator

EWMA_WEIGHT = 0.25  # weight of a new step time: only about the last seven count, since contexts grow
FORGET_AFTER = 32  # measurements of other batch sizes after which a batch size is forgotten
OUTLIER_RATIO = 1.25  # measured over expected time; one outlier is a disturbance, two in a row are a change
CLOSE_RATIO = 1.1  # maximum ratio of upper to lower bound at which both are as good as a measurement
INITIAL_NOISE = 0.05  # assumed standard deviation, as a fraction of the step time
MIN_NOISE = 0.01
P99_SIGMAS = 2.33  # standard deviations from the mean to the 99th percentile of a normal distribution


@dataclass(frozen=True, slots=True)
class TimeBounds:
    """Bounds of a step time, in seconds; equal for a batch size that was measured recently."""

    least_s: float
    most_s: float


@dataclass(frozen=True, slots=True)
class CostEstimate:
    seconds: float
    error: float  # standard error, as a fraction of `seconds`


class DecodeStepCost:
    """Time of steps without prompt tokens by number of answers, learned from recent steps.

    Batch sizes that were not measured recently are bounded by their neighbours: more answers never take less time, and
    never more time than in proportion to their number.
    """

    def __init__(self) -> None:
        self._measured = OnlineEstimator(EWMA_WEIGHT, FORGET_AFTER)
        self._outlier_ratio = 1.0  # ratio of the last measurement if it was an outlier, otherwise 1
        self._variance = INITIAL_NOISE**2

    @property
    def noise(self) -> float:
        """Standard deviation of a step time, as a fraction of the step time."""
        return max(MIN_NOISE, math.sqrt(self._variance))

    @property
    def in_doubt(self) -> bool:
        """Return whether the last measurement was an outlier: the next one shows whether step times have changed."""
        return self._outlier_ratio != 1.0

    def estimate(self, answers: int) -> CostEstimate | None:
        """Return the time of a step of `answers` answers, or None if the bounds of that time are far apart."""
        expected = self.expected(answers)
        if expected is None or expected.most_s > CLOSE_RATIO * expected.least_s:
            return None
        error = self.noise * math.sqrt(self._measured.variance_share(answers))
        return CostEstimate((expected.least_s + expected.most_s) / 2, error)

    def covers(self, answers: int) -> bool:
        """Return whether this batch size, or both a smaller and a larger one, was measured recently."""
        measured = self._measured.estimates
        return answers in measured or (bool(measured) and min(measured) < answers < max(measured))

    def long_s(self, answers: int) -> float:
        """Return the 99th percentile of the time of a step; 0 before the first measurement."""
        expected = self.expected(answers)
        return 0.0 if expected is None else expected.least_s * (1.0 + P99_SIGMAS * self.noise)

    def observe(self, answers: int, seconds: float) -> float:
        self._measured.advance()
        expected = self.expected(answers)
        if expected is None:
            self._measured.add(answers, seconds)
            return 1.0
        ratio = seconds / expected.least_s if seconds < expected.least_s else max(1.0, seconds / expected.most_s)
        last_ratio, is_outlier = self._outlier_ratio, not 1 / OUTLIER_RATIO <= ratio <= OUTLIER_RATIO
        self._outlier_ratio = ratio if is_outlier else 1.0
        change = 1.0
        if is_outlier:
            if last_ratio == 1.0 or (ratio > 1.0) != (last_ratio > 1.0):
                return 1.0  # a single outlier is ignored
            change = min(ratio, last_ratio) if ratio > 1.0 else max(ratio, last_ratio)
            self._outlier_ratio = 1.0
            self._measured.scale(change)
        elif answers in self._measured.estimates:
            self._variance += (EWMA_WEIGHT / 4) * ((ratio - 1.0) ** 2 - self._variance)
        self._measured.add(answers, seconds)
        self._measured.forget_old()
        return change

    def expected(self, answers: int) -> TimeBounds | None:
        """Return the bounds of a step time, or None before the first measurement."""
        measured = self._measured.estimates
        if answers in measured:
            return TimeBounds(measured[answers].seconds, measured[answers].seconds)
        if not measured:
            return None
        fewer = [(count, each.seconds) for count, each in measured.items() if count < answers]
        more = [(count, each.seconds) for count, each in measured.items() if count > answers]
        least = [seconds for _, seconds in fewer] + [seconds * answers / count for count, seconds in more]
        most = [seconds for _, seconds in more] + [seconds * answers / count for count, seconds in fewer]
        return TimeBounds(min(max(least), min(most)), max(max(least), min(most)))


LONG_DECAY, SHORT_DECAY = 0.99, 0.85  # decay per step of the two fits: about the last 100 or 7 steps count
SAFETY_SIGMAS = 1.0  # standard errors added to the long fit
CONTRADICTION_SIGMAS = 3.0  # standard errors beyond which the short fit overrules the long one
MAX_EXTRA_SHARE = 0.25  # cap of unexpected extra time, as a fraction of the time without prompt tokens
MIN_WEIGHT = 16.0  # measured steps before the cost is reported
MIN_PRIOR_TOKENS, PRIOR_ERROR = 16, 0.25  # a first estimate needs this many tokens, and has this relative error


class _LinearFit:
    """Least-squares line through the origin with exponential decay of older steps."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.squares = self.products = self._certainty = 0.0

    def add(self, tokens: int, seconds: float, error_s: float) -> None:
        """Add a measurement, weighted by its standard error `error_s`."""
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


class PrefillTokenCost:
    """Time that one prompt token adds to a step, fitted to how much longer steps take with prompt tokens.

    Two fits have long and short memory. The long one is used unless the short one contradicts it, so the cost is steady
    under noise and still follows a machine that changes.
    """

    def __init__(self) -> None:
        self._long, self._short = _LinearFit(LONG_DECAY), _LinearFit(SHORT_DECAY)
        self._steps = 0.0

    @property
    def is_sure(self) -> bool:
        """Return whether enough steps were measured to report the cost."""
        return self._steps >= MIN_WEIGHT

    def observe(self, tokens: int, extra_s: float, own_s: float, error: float) -> None:
        """Record a step that took `extra_s` longer than it would have without its prompt tokens.

        `own_s`: estimated time of the step without prompt tokens. `error`: standard error of `extra_s`, as a fraction
        of the step time.
        """
        expected_s = max(0.0, self._long.slope, self._short.slope) * tokens if self._steps else 0.0
        extra_s = min(max(extra_s, -MAX_EXTRA_SHARE * own_s), MAX_EXTRA_SHARE * own_s + 2.0 * expected_s)
        error_s = error * (own_s + expected_s)
        for fit in (self._long, self._short):
            fit.add(tokens, extra_s, error_s)
        self._steps = LONG_DECAY * self._steps + 1.0

    def expect(self, tokens: int, seconds: float) -> None:
        """Use the time of a step without answers as a first estimate, until enough steps are measured."""
        if self.is_sure or tokens < MIN_PRIOR_TOKENS:
            return
        for fit in (self._long, self._short):
            fit.add(tokens, seconds, PRIOR_ERROR * seconds)
        self._steps = max(self._steps, LONG_DECAY)

    def scale(self, ratio: float) -> None:
        """Multiply the cost by `ratio`, by which the times of all steps have changed."""
        for fit in (self._long, self._short):
            fit.products *= ratio

    @property
    def seconds(self) -> float | None:
        """Cautious (high) estimate of the cost of one more prompt token; None before the first measurement."""
        if not self._steps:
            return None
        long, short = self._long, self._short
        return max(max(0.0, long.slope) + SAFETY_SIGMAS * long.error, short.slope - CONTRADICTION_SIGMAS * short.error)


PROMISED_SHARE = 0.10  # maximum time that prompt tokens add to a step, as a fraction of it; tests check it
TARGET_SHARE = PROMISED_SHARE / 2  # planned fraction: keeps the promise if a token costs up to twice the learned cost
DELIVERY_SHARE = 0.1  # fraction of a TBT objective reserved for a token's way to its client
FIRST_AIM, LEAST_AIM, MOST_AIM = 0.85, 0.7, 0.97  # planned fractions of a TBT objective: initial, and bounds
AIM_STEP = 0.02  # change of that fraction after a step that took longer than the objective
MISSED_SHARE = 0.001  # fraction of steps that may: an answer of 100 tokens meets a p99 objective if no step misses
MAX_ALONE_S = 0.4  # longest step without answers: a prompt that arrives during it waits for its end
PROBE_EVERY = 8  # one in this many steps has no prompt tokens, to measure the time of its answers alone
MIN_ALONE_TOKENS = 64  # minimum prompt tokens of a step without answers: fewer would cost more for each
MIN_TOKENS = 1  # minimum prompt tokens of a step that has any, so that a prompt always advances
TRUST_FACTOR = 2.0  # maximum ratio of a chunk to the largest one measured recently
DECAY = 0.98  # decay per step of the largest chunk measured recently
ALONE_DECAY = 0.9  # decay of the prefill rate without answers, per step
ALONE_TRUST = 0.1  # fraction of a chunk without answers that counts as measured with answers


class PromptRates(NamedTuple):
    """Prefill rates in prompt tokens per second; None before enough steps are measured."""

    alone_tokens_per_s: float | None  # while no answer runs
    beside_tokens_per_s: float | None  # while answers run


LENT_WEIGHT, UNLENT_WEIGHT = 0.25, 0.02  # weights of a step with, and of one without the cores of another worker


class LentGain:
    """Estimate of the speed-up of prompts by the cores of another worker: `gain` 0.5 means 1.5 times the rate without.

    It is learned from steps with these cores. In steps without them it slowly returns to `most`, so that the cores are
    tried again.
    """

    def __init__(self, most: float) -> None:
        self.most = self.gain = most

    def observe(self, with_lent: bool, tokens_per_s: float, own_tokens_per_s: float | None) -> None:
        """Record the rate of a step. `own_tokens_per_s`: known rate without lent cores."""
        if not with_lent:
            self.gain += UNLENT_WEIGHT * (self.most - self.gain)
        elif own_tokens_per_s is not None:
            measured = min(max(0.0, tokens_per_s / own_tokens_per_s - 1.0), 2.0 * self.most)
            self.gain += LENT_WEIGHT * (measured - self.gain)


class StepBudget:
    """Limit on the prompt tokens of the next step, so that the step meets a target time.

    The target is TARGET_SHARE more than the time of a step without prompt tokens, or a given time. To measure steps
    without prompt tokens, one step in PROBE_EVERY has none.
    """

    def __init__(self) -> None:
        self._own = DecodeStepCost()
        self._token = PrefillTokenCost()
        self._unsettled: list[
            tuple[int, int, float]
        ] = []  # answers, prompt tokens and seconds of each step since the last one without prompt tokens
        self._largest = 0.0  # largest recent chunk, in tokens
        self._answers = 0  # number of answers in the last decode step
        self._alone_tokens = self._alone_s = 0.0
        self._aim = FIRST_AIM  # planned fraction of a TBT objective, so that MISSED_SHARE of the steps miss it
        self._target_s = 0.0  # TBT objective of the last planned step; 0: the step did not use it

    def observe(self, answers: int, prompt_tokens: int, seconds: float, period_s: float = 0.0) -> None:
        """Record the time of a step, and the time since the end of the previous one (0: unknown)."""
        if answers == 0:
            self._alone_tokens = ALONE_DECAY * self._alone_tokens + prompt_tokens
            self._alone_s = ALONE_DECAY * self._alone_s + seconds
            self._token.expect(prompt_tokens, seconds)
            self._largest = max(self._largest, ALONE_TRUST * prompt_tokens)
            return
        self._answers = answers
        if prompt_tokens:
            self._learn_aim(max(seconds, period_s))
            if len(self._unsettled) < PROBE_EVERY:
                self._unsettled.append((answers, prompt_tokens, seconds))
            self._largest = max(DECAY * self._largest, prompt_tokens)
            return
        change = self._own.observe(answers, seconds)
        if change != 1.0:
            self._token.scale(change)
        if change == 1.0 and not self._own.in_doubt:
            self._settle()
        self._unsettled.clear()

    def prompt_tokens(self, answers: int, most: int, beside_s: float = 0.0, target_s: float = 0.0) -> int:
        """Return the number of prompt tokens for the next step, at most `most`; 0 to measure its answers alone.

        `beside_s`: time of the step's other work, such as drafting, which the target must cover too. `target_s`: time
        that the step may take, from `goal_s`, if it is more than TARGET_SHARE allows.
        """
        measured = not self._unsettled  # the last decode step had no prompt tokens
        own = self._own.expected(answers)
        self._target_s = 0.0
        if own is None or len(self._unsettled) >= PROBE_EVERY - 1:
            return 0
        if self._own.in_doubt or not (measured or self._own.covers(answers)):
            return 0
        affordable = self._affordable(own, beside_s, target_s)
        if affordable > max(MIN_TOKENS, self._affordable(own)):
            self._target_s = target_s - beside_s
        return min(most, max(MIN_TOKENS, int(min(affordable, TRUST_FACTOR * self._largest))))

    def goal_s(self, answers: int, objectives_s: Iterable[float]) -> float:
        """Return the longest time of a step by the strictest TBT objective of its answers, less DELIVERY_SHARE.

        An objective that they miss without prompts is doubled.
        """
        own_s = self._own.long_s(answers)
        return (1.0 - DELIVERY_SHARE) * min((reachable(each, own_s) for each in objectives_s), default=0.0)

    def spare_s(self, answers: int, goal_s: float) -> float:
        """Return for how long a step without prompt tokens may wait, so that it ends within `goal_s`."""
        own = self._own.expected(answers)
        return 0.0 if own is None or self._own.in_doubt else max(0.0, self._aim * goal_s - own.most_s)

    def alone_tokens(self, most: int) -> int:
        """Return the number of prompt tokens for a step without answers: at most `most`, and at least one block's worth
        of arithmetic (MIN_ALONE_TOKENS), within MAX_ALONE_S.
        """
        alone = self._alone_tokens_per_s
        return most if alone is None else min(most, max(MIN_ALONE_TOKENS, int(MAX_ALONE_S * alone)))

    def after_completed(self, computed: int, tbt_s: float) -> int:
        """Return how many more tokens may follow the `computed` ones of a step without answers that completes a prompt.

        Its first token waits for them: for at most `tbt_s`, the TBT objective, unless the step would be too small
        (MIN_ALONE_TOKENS). Without an objective (0), any number may follow.
        """
        alone = self._alone_tokens_per_s
        if alone is None or not tbt_s:
            return sys.maxsize
        return max(MIN_ALONE_TOKENS - computed, int(tbt_s * alone), 0)

    def rates(self, most: int, target_s: float = 0.0) -> PromptRates:
        """Return the prefill rates of steps of at most `most` tokens, with as many answers as the last decode step.

        `target_s`: see `prompt_tokens`.
        """
        return PromptRates(self._alone_tokens_per_s, self._beside_tokens_per_s(most, target_s))

    @property
    def _alone_tokens_per_s(self) -> float | None:
        return self._alone_tokens / self._alone_s if self._alone_s > 0.0 else None

    def _beside_tokens_per_s(self, most: int, target_s: float) -> float | None:
        own, cost = self._own.expected(self._answers), self._token.seconds
        if own is None or cost is None or not self._token.is_sure:
            return None
        affordable = self._affordable(own, target_s=reachable(target_s, self._own.long_s(self._answers)))
        tokens = min(max(float(MIN_TOKENS), affordable), max(MIN_TOKENS, most - self._answers))
        tokens *= (PROBE_EVERY - 1) / PROBE_EVERY
        step_s = own.least_s + tokens * cost
        if (alone := self._alone_tokens_per_s) is None:
            return tokens / step_s
        # The cost may be learned from few tokens, computed while memory is read; more tokens overlap half of that time.
        return min(tokens / step_s, alone * (1.0 - own.least_s / step_s / 2.0))

    def _affordable(self, own: TimeBounds, beside_s: float = 0.0, target_s: float = 0.0) -> float:
        cost = self._token.seconds
        if cost is None:
            return MIN_TOKENS
        return max(TARGET_SHARE * own.least_s, self._aim * target_s - own.most_s - beside_s) / cost

    def _learn_aim(self, seconds: float) -> None:
        """Follow the quantile of step times: a miss lowers the aim as much as 1 000 steps in time raise it."""
        if self._target_s:
            change = -AIM_STEP if seconds > self._target_s else AIM_STEP * MISSED_SHARE
            self._aim = min(MOST_AIM, max(LEAST_AIM, self._aim + change))

    def _settle(self) -> None:
        """Fit the token cost to the steps since the last probe, now that both probes around them are measured."""
        for answers, tokens, seconds in self._unsettled:
            own = self._own.estimate(answers)
            if own is not None:
                # All these steps share one error of `own`, which does not average out.
                error = math.sqrt(self._own.noise**2 + (PROBE_EVERY - 1) * own.error**2)
                self._token.observe(tokens, seconds - own.seconds, own.seconds, error)


def reachable(target_s: float, own_s: float) -> float:
    """Return the objective, doubled until `own_s`, the time of long steps without prompts, meets it."""
    while 0.0 < target_s < own_s:
        target_s *= 2.0
    return target_s
