"""Beam search: which beams continue and which are finished. A request's beams step together and share blocks. Pure.

The rules are those of transformers' generate(num_beams=k). A beam's score is its sum of log-probabilities, divided by
length ** length_penalty when the beam finishes. An end token finishes a beam if it is among the k best of its step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from operator import attrgetter
from typing import NamedTuple

from baton.engine.request import Drawn, EndReason, TokenLogprob
from baton.engine.scheduler.batch import RunningBatch
from baton.engine.scheduler.sequences import RequestFailed, ScheduledSequence, TokenMade
from baton.text.sampling import BeamParams, BeamStop


class Continuation(NamedTuple):
    """Beam of the next step: its parent and the token that extends it."""

    parent: int  # index among the beams of the last step
    token: TokenLogprob
    score: float  # sum of the answer's log-probabilities


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Finished beam: its last token is a stop token, or it has the maximum length."""

    tokens: tuple[TokenLogprob, ...]
    cumulative_logprob: float
    score: float  # cumulative_logprob / length ** length_penalty
    stopped: bool  # whether a stop token ended it


class BeamSearch:
    """Search that starts with one empty beam; every `advance` extends all beams by one token.

    A step needs the `candidates_per_beam` (engine/sampling/params.py) most likely tokens of each beam.
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
        """The k best finished beams, best first."""
        return list(self._ended)

    @property
    def length(self) -> int:
        """Number of tokens of each running beam; all have the same number."""
        return len(self._beams[0])

    def advance(self, candidates: Sequence[Sequence[TokenLogprob]]) -> list[Continuation]:
        """Extend all beams by one token. Return the beams of the next step, best first; none if the search is over.

        `candidates`: most likely tokens of each beam, in descending order; beams in the order of the last result.
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
        """Return the best continuations: enough for k beams to continue even if many finish. Ties keep their order."""
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
        """Return whether no running beam can improve the result.

        `best_score`: sum of log-probabilities of the best running beam. `length`: number of tokens of every beam.
        """
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


@dataclass(slots=True)
class BeamGroup:
    """Running beams of one request, in the order of its search."""

    search: BeamSearch
    beams: list[ScheduledSequence]
    candidates: dict[ScheduledSequence, Sequence[TokenLogprob]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Return whether all tokens of all beams are computed; false while a beam is preempted or recomputed."""
        return all(beam.table is not None and beam.uncomputed_tokens == 0 for beam in self.beams)


class BeamGroups:
    """Beam groups of one batch. Whoever removes a request's sequences must call `forget`.

    A group advances once all its beams are computed, so it waits for preempted beams.
    """

    def __init__(self, batch: RunningBatch) -> None:
        self._batch = batch
        self._groups: dict[int, BeamGroup] = {}

    def take(self, sequence: ScheduledSequence, top: Sequence[TokenLogprob]) -> list[TokenMade | RequestFailed]:
        """Record `top`, the most likely next tokens of a fully computed prompt or beam; advance if no beam lacks them.

        Return all answers when the search is over, otherwise an empty list.
        """
        request, beam = sequence.request, sequence.request.params.beam
        if beam is None:
            raise ValueError(f"request {request.request_id}: not a beam search")
        group = self._groups.get(request.request_id)
        if group is None:
            search = BeamSearch(beam, request.params.max_tokens, request.params.stop_token_ids)
            group = self._groups[request.request_id] = BeamGroup(search, [sequence])
        group.candidates[sequence] = top
        if not group.complete:
            return []
        continuations = group.search.advance([group.candidates[each] for each in group.beams])
        group.candidates.clear()
        if group.search.done:
            return self._end(group)
        group.beams = self._batch.branch(group.beams, [each.parent for each in continuations])
        for each, continuation in zip(group.beams, continuations, strict=True):
            each.token_ids.append(continuation.token.token_id)
        return []

    def forget(self, request_id: int) -> None:
        self._groups.pop(request_id, None)

    def _end(self, group: BeamGroup) -> list[TokenMade | RequestFailed]:
        request, cached_tokens = group.beams[0].request, group.beams[0].cached_tokens or 0
        for beam in group.beams:
            self._batch.end(beam)
        self.forget(request.request_id)
        best = group.search.hypotheses[: request.params.n]
        if len(best) < request.params.n:
            return [RequestFailed(request.request_id)]  # the vocabulary is too small for this many beams
        return [
            made
            for choice, hypothesis in enumerate(best)
            for made in _tokens(request.request_id, choice, hypothesis, cached_tokens)
        ]


def _tokens(request_id: int, choice: int, hypothesis: Hypothesis, cached_tokens: int) -> list[TokenMade]:
    last = len(hypothesis.tokens) - 1
    end = EndReason.STOP if hypothesis.stopped else EndReason.LENGTH
    return [
        TokenMade(
            request_id,
            choice,
            offset,
            Drawn(token.token_id, token.logprob),
            end if offset == last else None,
            cached_tokens,
        )
        for offset, token in enumerate(hypothesis.tokens)
    ]
