"""How many prompt tokens a step may compute beside running answers, by the times of steps. Pure, without a clock.

A step with prompt tokens takes at most a tenth longer than it would without them, however many wait; or, where there is
a target, at most that long. Its time without them is measured: one step in every few has none of them.
"""

import math
from typing import NamedTuple

from engine.own_cost import Bounds, OwnCost
from engine.token_cost import TokenCost

PROMISED_SHARE = 0.10  # of a step without prompt tokens: no step takes longer by more
SHARE = 0.05  # that is aimed at: where a token costs twice the learned cost the promise still holds
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
    """`target_s`: the time that a step with prompt tokens may take, seconds. None: SHARE more than without them."""

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

    def prompt_tokens(self, answers: int, most: int) -> int:
        """How many the next step may have beside so many answers, at most `most`; 0 where it is to be measured."""
        measured = not self._unsettled  # the last step with answers had no prompt token
        own = self._own.expected(answers)
        if own is None or len(self._unsettled) >= PROBE_EVERY - 1:
            return 0
        if self._own.in_doubt or not (measured or self._own.covers(answers)):
            return 0
        allowed = min(self._affordable(own), BELIEVED * self._largest)
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

    def _affordable(self, own: Bounds) -> float:
        cost = self._token.seconds
        if cost is None:
            return LEAST_TOKENS
        extra_s = SHARE * own.least_s
        if self._target_s is not None:
            extra_s = max(extra_s, AIM * self._target_s - own.most_s)
        return extra_s / cost

    def _settle(self) -> None:
        """Compares the steps with prompt tokens with the known costs: measurements from before and after them."""
        for answers, tokens, seconds in self._unsettled:
            own = self._own.known(answers)
            if own is not None:
                # The cost that they are compared with is wrong for all of them alike: its error does not average out.
                error = math.sqrt(self._own.noise**2 + (PROBE_EVERY - 1) * own.error**2)
                self._token.observe(tokens, seconds - own.seconds, own.seconds, error)
