"""The answer as a client sees it: contiguous tokens become text, cut at stop strings, with offsets and an end. Pure."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from router.detokenizer import Detokenizer
from router.events import End, TokenLogprob
from router.lifecycle import Released
from router.stop_strings import Piece, StopFilter


class FinishReason(Enum):
    STOP = auto()
    LENGTH = auto()


@dataclass(slots=True)
class Delta:
    """New tokens of one choice; `offset` is the position of the first of them. The text may lag the tokens.

    It never changes; it is not frozen because that takes twice as long to make, and nearly every token has one.
    `logprobs` has one entry per token, or none if they were not asked for.
    """

    index: int
    offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """The end of one choice. At most one of `stop_text` and `stop_token_id` is set."""

    index: int
    reason: FinishReason
    stop_text: str | None = None
    stop_token_id: int | None = None


AnswerEvent = Delta | ChoiceFinished


class _Choice:
    def __init__(self, index: int, detokenizer: Detokenizer, stop_filter: StopFilter) -> None:
        self.index = index
        self.tokens = 0  # given out
        self.finished = False
        self._detokenizer = detokenizer
        self._filter = stop_filter
        self._logprobs: deque[TokenLogprob] = deque()  # of tokens that the filter holds, if asked for

    def take(self, released: Released) -> Sequence[AnswerEvent]:
        if self._filter.passes_all and released.end is None:  # as nearly all are
            token_ids, begin = released.token_ids, self.tokens
            self.tokens += len(token_ids)
            return (Delta(self.index, begin, token_ids, self._detokenizer.push_all(token_ids), released.logprobs),)
        return self._take(released)

    def _take(self, released: Released) -> Sequence[AnswerEvent]:
        self._logprobs.extend(released.logprobs)
        if self._filter.passes_all:
            pieces = [Piece(released.token_ids, self._detokenizer.push_all(released.token_ids))]
        else:
            pieces = [self._filter.push(token_id, self._detokenizer.push(token_id)) for token_id in released.token_ids]
        if released.end is not None:
            pieces.append(self._filter.finish(self._detokenizer.finish()))
        events: list[AnswerEvent] = []
        delta = self._delta(pieces)
        if delta.token_ids or delta.text:
            events.append(delta)
        finished = self._finished(released)
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

    def _finished(self, released: Released) -> ChoiceFinished | None:
        if self._filter.matched is not None:
            return ChoiceFinished(self.index, FinishReason.STOP, stop_text=self._filter.matched)
        match released.end:
            case End.STOP:
                stop_token_id = released.token_ids[-1] if released.token_ids else released.stop_token_id
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

    def take(self, released: Released) -> Sequence[AnswerEvent]:
        """The events that go out now. Tokens beyond a stop string are dropped."""
        choice = self._choices[released.choice]
        if choice.finished:
            return ()
        events = choice.take(released)
        self._unfinished -= choice.finished
        return events
