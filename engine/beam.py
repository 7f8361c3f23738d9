"""Beam search: which beams of one request continue, which have ended, and when it is over. Pure; knows no pages.

The rules are those of transformers' generate(num_beams=k): scores are sums of log-probabilities, divided by
length ** length_penalty once a beam ends; an end token counts where it is among the k best of its step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from operator import attrgetter
from typing import NamedTuple

from engine.beam_params import BeamParams, BeamStop
from engine.plan import TokenLogprob


class Continuation(NamedTuple):
    """A beam of the next step: the beam that it continues, and by which token."""

    parent: int  # index among the beams of the last step
    token: TokenLogprob
    score: float  # sum of the log-probabilities of the answer so far


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A beam that has ended, by a stop token, which is its last, or by its length."""

    tokens: tuple[TokenLogprob, ...]
    cumulative_logprob: float
    score: float  # cumulative_logprob / length ** length_penalty
    stopped: bool  # by a stop token


class BeamSearch:
    """Begins as one empty beam; every `advance` makes all beams longer by a token.

    A step needs the `candidates_per_beam` (engine/beam_params.py) likeliest tokens of each beam.
    """

    def __init__(self, params: BeamParams, max_tokens: int, stop_token_ids: frozenset[int]) -> None:
        self._params = params
        self._max_tokens = max_tokens
        self._stop_token_ids = stop_token_ids
        self._beams: list[tuple[TokenLogprob, ...]] = [()]
        self._scores: list[float] = [0.0]
        self._ended: list[Hypothesis] = []
        self.done = False

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """The k best that have ended, best first."""
        return list(self._ended)

    @property
    def length(self) -> int:
        """Tokens of each running beam."""
        return len(self._beams[0])

    def advance(self, candidates: Sequence[Sequence[TokenLogprob]]) -> list[Continuation]:
        """The beams of the next step, best first; none when the search is over.

        `candidates` are the likeliest tokens of each beam, likeliest first, in the order of the last step's result.
        """
        width = self._params.width
        best = self._best(candidates)
        length = self.length + 1
        ends = [length == self._max_tokens or each.token.token_id in self._stop_token_ids for each in best]
        self._end([each for each, end in zip(best[:width], ends, strict=False) if end], length)
        running = [each for each, end in zip(best, ends, strict=True) if not end][:width]
        self.done = not running or self._is_over(running[0].score, length)
        if self.done:
            return []
        self._beams = [(*self._beams[each.parent], each.token) for each in running]
        self._scores = [each.score for each in running]
        return running

    def _best(self, candidates: Sequence[Sequence[TokenLogprob]]) -> list[Continuation]:
        """Enough for k that continue, however many of them end; the first of equal ones first."""
        continuations = [
            Continuation(parent, token, score + token.logprob)
            for parent, (score, tokens) in enumerate(zip(self._scores, candidates, strict=True))
            for token in tokens
        ]
        kept = self._params.width * (1 + max(1, len(self._stop_token_ids)))
        return nlargest(kept, continuations, key=attrgetter("score"))

    def _end(self, ended: Sequence[Continuation], length: int) -> None:
        divisor = math.pow(length, self._params.length_penalty)
        new = [
            Hypothesis(
                (*self._beams[each.parent], each.token),
                each.score,
                each.score / divisor,
                stopped=each.token.token_id in self._stop_token_ids,
            )
            for each in ended
        ]
        self._ended = nlargest(self._params.width, self._ended + new, key=attrgetter("score"))

    def _is_over(self, best_score: float, length: int) -> bool:
        """`best_score` is the sum of the best running beam, which has `length` tokens."""
        if len(self._ended) < self._params.width:
            return False
        penalty = self._params.length_penalty
        match self._params.stop:
            case BeamStop.FULL:
                return True
            case BeamStop.NEVER if penalty > 0.0:
                reachable = best_score / math.pow(self._max_tokens, penalty)
            case _:
                reachable = best_score / math.pow(length, penalty)
        return reachable <= self._ended[-1].score
