"""The answer as a client sees it: contiguous tokens become text, cut at stop strings, with offsets and an end. Pure."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.generation.detokenizer import Detokenizer
from baton.generation.stop_strings import Piece, StopFilter
from baton.router.types.events import End, NewTokens, PromptScores, TokenLogprob
from baton.router.types.response import AnswerEvent, ChoiceFinished, Delta, FinishReason, PromptPart

PART_TOKENS = 1024  # bounds a message: at most 20 likeliest tokens come with each


class PromptEcho:
    """The part still to be sent. With `scored`, tokens come with their scores; the first one, which has none, alone."""

    def __init__(self, token_ids: tuple[int, ...], text: str, scored: bool, sent_tokens: int = 0) -> None:
        """`sent_tokens`: so many tokens, with the text, were sent over another stream."""
        self._token_ids = token_ids
        self._text = text
        self._scored = scored
        self._sent_tokens = sent_tokens

    def take(self, scores: PromptScores) -> tuple[PromptPart, ...]:
        """The parts that these scores make known; none where another attempt already made them known."""
        parts = self._first()
        new = scores.logprobs[self._sent_tokens - scores.offset :]
        return parts + self._parts(self._sent_tokens + len(new), new)

    def rest(self) -> tuple[PromptPart, ...]:
        """All that was not sent: to be called when every score was taken, or none is wanted."""
        return self._first() if self._scored else self._parts(len(self._token_ids), ())

    def _first(self) -> tuple[PromptPart, ...]:
        return self._parts(max(1, self._sent_tokens), ())

    def _parts(self, end: int, logprobs: tuple[TokenLogprob, ...]) -> tuple[PromptPart, ...]:
        begin, self._sent_tokens = self._sent_tokens, end
        return tuple(
            PromptPart(
                offset,
                self._token_ids[offset : min(offset + PART_TOKENS, end)],
                self._text if offset == 0 else "",
                logprobs[offset - begin : offset - begin + PART_TOKENS],
            )
            for offset in range(begin, end, PART_TOKENS)
        )


class _Choice:
    def __init__(self, index: int, detokenizer: Detokenizer, stop_filter: StopFilter) -> None:
        self.index = index
        self.tokens = 0  # given out
        self.finished = False
        self._detokenizer = detokenizer
        self._filter = stop_filter
        self._logprobs: deque[TokenLogprob] = deque()  # of tokens that the filter holds, if asked for

    def take(self, new_tokens: NewTokens) -> Sequence[AnswerEvent]:
        if self._filter.passes_all and new_tokens.end is None:  # as nearly all are
            token_ids, begin = new_tokens.token_ids, self.tokens
            self.tokens += len(token_ids)
            return (Delta(self.index, begin, token_ids, self._detokenizer.push_all(token_ids), new_tokens.logprobs),)
        return self._take(new_tokens)

    def _take(self, new_tokens: NewTokens) -> Sequence[AnswerEvent]:
        self._logprobs.extend(new_tokens.logprobs)
        if self._filter.passes_all:
            pieces = [Piece(new_tokens.token_ids, self._detokenizer.push_all(new_tokens.token_ids))]
        else:
            pieces = [
                self._filter.push(token_id, self._detokenizer.push(token_id)) for token_id in new_tokens.token_ids
            ]
        if new_tokens.end is not None:
            pieces.append(self._filter.finish(self._detokenizer.finish()))
        events: list[AnswerEvent] = []
        delta = self._delta(pieces)
        if delta.token_ids or delta.text:
            events.append(delta)
        finished = self._finished(new_tokens)
        if finished is not None:
            self.finished = True
            events.append(finished)
        return events

    def _delta(self, pieces: list[Piece]) -> Delta:
        token_ids = tuple(token_id for piece in pieces for token_id in piece.token_ids)
        text = "".join(piece.text for piece in pieces)
        logprobs = tuple(self._logprobs.popleft() for _ in token_ids) if self._logprobs else ()
        delta = Delta(self.index, self.tokens, token_ids, text, logprobs)
        self.tokens += len(token_ids)
        return delta

    def _finished(self, new_tokens: NewTokens) -> ChoiceFinished | None:
        if self._filter.matched is not None:
            return ChoiceFinished(self.index, FinishReason.STOP, stop_text=self._filter.matched)
        match new_tokens.end:
            case End.STOP:
                stop_token_id = new_tokens.token_ids[-1] if new_tokens.token_ids else new_tokens.stop_token_id
                return ChoiceFinished(self.index, FinishReason.STOP, stop_token_id=stop_token_id)
            case End.LENGTH:
                return ChoiceFinished(self.index, FinishReason.LENGTH)
            case None:
                return None


class Answer:
    """All choices of one request."""

    def __init__(
        self, choices: int, stops: tuple[str, ...], min_tokens: int, new_detokenizer: Callable[[], Detokenizer]
    ) -> None:
        self._choices = [_Choice(index, new_detokenizer(), StopFilter(stops, min_tokens)) for index in range(choices)]
        self._unfinished = choices

    @property
    def done(self) -> bool:
        return self._unfinished == 0

    def has_finished(self, index: int) -> bool:
        return self._choices[index].finished

    @property
    def completion_tokens(self) -> int:
        """Tokens given out, over all choices. Those of a stop string, and beyond it, are not."""
        return sum(choice.tokens for choice in self._choices)

    def take(self, new_tokens: NewTokens) -> Sequence[AnswerEvent]:
        """The events that go out now. Tokens beyond a stop string are dropped."""
        choice = self._choices[new_tokens.choice]
        if choice.finished:
            return ()
        events = choice.take(new_tokens)
        self._unfinished -= choice.finished
        return events


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

    def take(self, new_tokens: NewTokens) -> Sequence[AnswerEvent]:
        """The events that go out now: all of them with the last tokens, none before or after those."""
        if self.done:
            return ()
        for event in self._made.take(new_tokens):
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
