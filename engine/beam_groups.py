"""Beam searches on pages: the beams of a request are sequences that step together and share their common blocks.

A beam that was not preempted waits for those that were; a group advances when all its beams are computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.beam import BeamSearch, Hypothesis
from engine.mixed_batch import MixedBatch
from engine.mixed_state import MixedSequence, RequestFailed, TokenMade
from engine.plan import Drawn, TokenLogprob
from engine.sequence import EndReason


@dataclass(slots=True)
class BeamGroup:
    """The running beams of one request, in the order of its search."""

    search: BeamSearch
    beams: list[MixedSequence]
    candidates: dict[MixedSequence, Sequence[TokenLogprob]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every beam is computed to its end; a preempted one computes its newest token again."""
        return all(beam.table is not None and beam.uncomputed_tokens == 0 for beam in self.beams)


class BeamGroups:
    """The groups of one batch; the caller that ends a request's sequences forgets its group."""

    def __init__(self, batch: MixedBatch) -> None:
        self._batch = batch
        self._groups: dict[int, BeamGroup] = {}

    def take(self, sequence: MixedSequence, top: Sequence[TokenLogprob]) -> list[TokenMade | RequestFailed]:
        """The likeliest tokens after a prompt or beam that is computed to its end.

        Returns the answers, all at once, when the search is over with it.
        """
        request, beam = sequence.request, sequence.request.params.beam
        if beam is None:
            raise ValueError(f"request {request.request_id} is no beam search")
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
            return [RequestFailed(request.request_id)]  # a vocabulary too small for so many beams
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
