"""The best of several choices: all are made, and the ones whose tokens are likeliest go out, at the end. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from router.answer import Answer, AnswerEvent, ChoiceFinished, Delta
from router.lifecycle import Released

DELTA_TOKENS = 1024  # bounds a message


class BestOf:
    """An answer of `n` choices out of those of `made`, whose tokens all come with their log-probabilities.

    The best has the highest mean log-probability per token, as OpenAI defines it; a stop string is no part of it.
    """

    def __init__(self, made: Answer, n: int, with_logprobs: bool) -> None:
        self._made = made
        self._n = n
        self._with_logprobs = with_logprobs
        self._deltas: dict[int, list[Delta]] = {}
        self._ends: dict[int, ChoiceFinished] = {}

    @property
    def done(self) -> bool:
        return self._made.done

    def has_finished(self, index: int) -> bool:
        """Of all choices that are made."""
        return self._made.has_finished(index)

    @property
    def completion_tokens(self) -> int:
        """Of all choices that were made."""
        return self._made.completion_tokens

    def take(self, released: Released) -> Sequence[AnswerEvent]:
        """The events that go out now: all of them with the last tokens, none before or after those."""
        if self.done:
            return ()
        for event in self._made.take(released):
            if isinstance(event, Delta):
                self._deltas.setdefault(event.index, []).append(event)
            else:
                self._ends[event.index] = event
        return tuple(self._best()) if self.done else ()

    def _best(self) -> list[AnswerEvent]:
        ranked = sorted(self._ends.values(), key=lambda end: (-self._mean_logprob(end.index), end.index))
        events: list[AnswerEvent] = []
        for place, end in enumerate(ranked[: self._n]):
            events += self._whole(place, self._deltas.get(end.index, ()))
            events.append(replace(end, index=place))
        return events

    def _mean_logprob(self, index: int) -> float:
        logprobs = [token.logprob for delta in self._deltas.get(index, ()) for token in delta.logprobs]
        return sum(logprobs) / len(logprobs) if logprobs else -float("inf")

    def _whole(self, place: int, deltas: Sequence[Delta]) -> list[AnswerEvent]:
        token_ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
        logprobs = tuple(token for delta in deltas for token in delta.logprobs) if self._with_logprobs else ()
        text = "".join(delta.text for delta in deltas)
        starts = range(0, len(token_ids), DELTA_TOKENS) or range(1)
        return [
            Delta(
                place,
                start,
                token_ids[start : start + DELTA_TOKENS],
                text if start == starts[-1] else "",
                logprobs[start : start + DELTA_TOKENS],
            )
            for start in starts
            if token_ids or text
        ]
