"""Answer as a client sees it: turns worker outputs into contiguous tokens, and tokens into text. Pure.

`TokenStream` orders outputs and releases every token once. Token 2 (from decode) may overtake token 1 (from prefill),
decode repeats prefill's tokens, a reopened link may repeat any output, and a new attempt continues after a failed one
or begins at the first token again. Each choice accepts tokens of one attempt at a time. `RequestAnswer` cuts the text
at stop strings and ends the choices.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from baton.router.types.events import NewTokens, PromptScores, SequenceEnd, SequenceOutput, TokenLogprob
from baton.router.types.response import AnswerEvent, ChoiceFinished, Delta, FinishReason, PromptPart
from baton.text.detokenizer import Detokenizer
from baton.text.sampling import mean_logprob
from baton.text.stop_strings import PassedTokens, StopFilter


class InconsistentOutput(Exception):
    """Error: a worker sent an unknown choice, tokens after a choice's end, or two different tokens for one offset."""


class NotRepeated(InconsistentOutput):
    """Error: an attempt generated a different token at an offset that an earlier attempt had released."""


@dataclass(slots=True)
class _Stream:
    attempt_id: int = 0  # attempt whose outputs the choice accepts; 0: none
    token_ids: list[int] = field(default_factory=list)  # released tokens
    carried: int = 0  # number of released tokens from earlier attempts
    waiting: dict[int, int] = field(default_factory=dict)  # received tokens that follow a missing one, by offset
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # log-probabilities of unreleased tokens, by offset
    length: int | None = None  # number of tokens; None: the end has not arrived
    end: SequenceEnd | None = None

    @property
    def done(self) -> bool:
        return len(self.token_ids) == self.length

    def begin(self, attempt_id: int) -> None:
        """Begin a new attempt. Tokens that were received but not released are dropped."""
        self.attempt_id = attempt_id
        self.waiting.clear()
        self.logprobs.clear()
        self.carried = len(self.token_ids)
        if not self.done:
            self.length = self.end = None

    def contradiction(self, offset: int, message: str) -> InconsistentOutput:
        return NotRepeated(message) if offset < self.carried else InconsistentOutput(message)


class TokenStream:
    """Tokens of all choices of one request, in order, over all attempts."""

    def __init__(self, choices: int) -> None:
        self._choices = [_Stream() for _ in range(choices)]

    def begin(self, attempt_id: int, choices: Iterable[int] | None = None) -> None:
        """Accept only outputs of this attempt for `choices` from now on; None: for all choices. Released tokens remain.

        Tokens that the attempt repeats must equal the released ones.
        """
        for choice in self._choices if choices is None else [self._choices[index] for index in choices]:
            choice.begin(attempt_id)

    def leave(self, attempt_id: int) -> None:
        """Ignore outputs of this attempt from now on."""
        for choice in self._choices:
            if choice.attempt_id == attempt_id:
                choice.attempt_id = 0

    def prime(self, index: int, token_ids: tuple[int, ...]) -> NewTokens:
        """Add the first tokens of a choice, which an earlier stream has released, and return them."""
        self._choices[index].token_ids.extend(token_ids)
        return NewTokens(index, 0, token_ids, None)

    def finish(self, index: int, end: SequenceEnd) -> NewTokens:
        """End a choice whose tokens were all released, and return its end."""
        choice = self._choices[index]
        choice.length, choice.end = len(choice.token_ids), end
        stop_token_id = choice.token_ids[-1] if end is SequenceEnd.STOP else None
        return NewTokens(index, len(choice.token_ids), (), end, stop_token_id=stop_token_id)

    def released(self, index: int) -> int:
        """Return the number of released tokens of a choice."""
        return len(self._choices[index].token_ids)

    def answer(self, index: int) -> tuple[int, ...]:
        """Return the released tokens of a choice."""
        return tuple(self._choices[index].token_ids)

    def take_all(self, outputs: deque[SequenceOutput]) -> tuple[NewTokens, ...]:
        """Consume `outputs` and return the tokens that became contiguous, as one NewTokens per choice.

        If an output is inconsistent, tokens before it are returned and it stays in `outputs` for the next call. Outputs
        of other attempts are dropped. Raises: InconsistentOutput if no token precedes an inconsistent output.
        """
        if len(outputs) == 1 and self._is_next(outputs[0]):
            output = outputs.popleft()
            self._choices[output.choice].token_ids.extend(output.token_ids)
            return (NewTokens(output.choice, output.offset, output.token_ids, None),)
        begins: dict[int, int] = {}  # offset of the first newly released token, by choice
        while outputs:
            try:
                self._take(outputs[0], begins)
            except InconsistentOutput:
                released = self._release(begins)
                if released:
                    return released
                raise
            outputs.popleft()
        return self._release(begins)

    def _is_next(self, output: SequenceOutput) -> bool:
        """Return whether an output only adds the next tokens of a choice, without log-probabilities: the usual case."""
        if output.choice >= len(self._choices) or output.end is not None or output.logprobs or not output.token_ids:
            return False
        choice = self._choices[output.choice]
        is_in_order = output.attempt_id == choice.attempt_id and output.offset == len(choice.token_ids)
        return is_in_order and choice.length is None and not (choice.waiting or choice.logprobs)

    def _take(self, output: SequenceOutput, begins: dict[int, int]) -> None:
        if output.choice >= len(self._choices):
            raise InconsistentOutput(f"output for choice {output.choice}, but the request has {len(self._choices)}")
        choice = self._choices[output.choice]
        if output.attempt_id != choice.attempt_id:
            return
        token_ids, waiting = choice.token_ids, choice.waiting
        begins.setdefault(output.choice, len(token_ids))
        if self._is_next(output):
            token_ids.extend(output.token_ids)
            return
        self._store(choice, output)
        while (token_id := waiting.pop(len(token_ids), None)) is not None:
            token_ids.append(token_id)

    def _release(self, begins: dict[int, int]) -> tuple[NewTokens, ...]:
        """Return the newly contiguous tokens.

        Raises: InconsistentOutput if only some of a choice's new tokens have log-probabilities.
        """
        released = []
        for index, begin in begins.items():
            choice = self._choices[index]
            fresh = tuple(choice.token_ids[begin:])
            if not fresh:
                continue
            logprobs: tuple[TokenLogprob, ...] = ()
            if choice.logprobs:
                received = [choice.logprobs.pop(offset, None) for offset in range(begin, begin + len(fresh))]
                logprobs = tuple(logprob for logprob in received if logprob is not None)
                if logprobs and len(logprobs) < len(fresh):
                    raise InconsistentOutput(f"choice {index}: only some of its tokens have log-probabilities")
            released.append(NewTokens(index, begin, fresh, choice.end if choice.done else None, logprobs))
        return tuple(released)

    def _store(self, choice: _Stream, output: SequenceOutput) -> None:
        beyond = output.offset + len(output.token_ids)
        if output.end is not None:
            if choice.length not in (None, beyond):
                message = f"choice {output.choice} ends after {choice.length} and after {beyond} tokens"
                raise choice.contradiction(min(choice.length or beyond, beyond) - 1, message)
            choice.length, choice.end = beyond, output.end
        if choice.length is not None and max(beyond, len(choice.token_ids)) > choice.length:
            message = f"choice {output.choice} continues after it ended with {choice.length} tokens"
            raise choice.contradiction(choice.length - 1, message)
        for offset, token_id in enumerate(output.token_ids, start=output.offset):
            known = choice.token_ids[offset] if offset < len(choice.token_ids) else choice.waiting.get(offset)
            if known is None:
                choice.waiting[offset] = token_id
            elif known != token_id:
                # Token ids are left out, because the message is logged.
                message = f"choice {output.choice} has two different tokens at offset {offset}"
                raise choice.contradiction(offset, message)
        for offset, logprob in enumerate(output.logprobs, start=output.offset):
            if offset >= len(choice.token_ids):
                choice.logprobs.setdefault(offset, logprob)


PART_TOKENS = 1024  # maximum tokens per PromptPart, each with up to 20 alternatives


class PromptEcho:
    """Echoed prompt, sent in parts. With `scored`, tokens are sent with their log-probabilities (scores); the first
    token has none.
    """

    def __init__(self, token_ids: tuple[int, ...], text: str, scored: bool, sent_tokens: int = 0) -> None:
        """Create the echo. `sent_tokens`: number of leading tokens that an earlier stream has sent, with their text."""
        self._token_ids = token_ids
        self._text = text
        self._scored = scored
        self._sent_tokens = sent_tokens

    def take(self, scores: PromptScores) -> tuple[PromptPart, ...]:
        """Return the prompt parts whose scores are new; none if a new attempt repeats known scores."""
        parts = self._first()
        new = scores.logprobs[self._sent_tokens - scores.offset :]
        return parts + self._parts(self._sent_tokens + len(new), new)

    def rest(self) -> tuple[PromptPart, ...]:
        """Return the parts that were not sent yet. Call it after the last scores, or if no scores are requested."""
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
        self.tokens = 0  # number of delivered tokens
        self.finished = False
        self._detokenizer = detokenizer
        self._filter = stop_filter
        self._logprobs: deque[TokenLogprob] = deque()  # log-probabilities of withheld tokens

    def take(self, new_tokens: NewTokens) -> Sequence[AnswerEvent]:
        if self._filter.passes_all and new_tokens.end is None:  # usual case: no stop strings, not the end
            token_ids, begin = new_tokens.token_ids, self.tokens
            self.tokens += len(token_ids)
            return (Delta(self.index, begin, token_ids, self._detokenizer.push_all(token_ids), new_tokens.logprobs),)
        return self._take(new_tokens)

    def _take(self, new_tokens: NewTokens) -> Sequence[AnswerEvent]:
        self._logprobs.extend(new_tokens.logprobs)
        if self._filter.passes_all:
            pieces = [PassedTokens(new_tokens.token_ids, self._detokenizer.push_all(new_tokens.token_ids))]
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

    def _delta(self, pieces: list[PassedTokens]) -> Delta:
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
            case SequenceEnd.STOP:
                stop_token_id = new_tokens.token_ids[-1] if new_tokens.token_ids else new_tokens.stop_token_id
                return ChoiceFinished(self.index, FinishReason.STOP, stop_token_id=stop_token_id)
            case SequenceEnd.LENGTH:
                return ChoiceFinished(self.index, FinishReason.LENGTH)
            case None:
                return None


class RequestAnswer:
    """Answer of one request: turns released tokens of all choices into deltas and ends."""

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
        """Number of delivered tokens over all choices. A stop string and what follows it are not counted."""
        return sum(choice.tokens for choice in self._choices)

    def take(self, new_tokens: NewTokens) -> Sequence[AnswerEvent]:
        """Return the events to send to the client now. Tokens after a stop string are dropped."""
        choice = self._choices[new_tokens.choice]
        if choice.finished:
            return ()
        events = choice.take(new_tokens)
        self._unfinished -= choice.finished
        return events


DELTA_TOKENS = 1024  # maximum tokens per Delta of a best-of answer


class BestOf:
    """Answer with the best `n` of all generated choices, which are the choices of `made`.

    The best choice has the highest mean log-probability per token, as OpenAI defines it. So every token of `made` must
    have a log-probability. Stop strings are not counted.
    """

    def __init__(self, made: RequestAnswer, n: int, with_logprobs: bool) -> None:
        self._made = made
        self._n = n
        self._with_logprobs = with_logprobs
        self._deltas: dict[int, list[Delta]] = {}
        self._ends: dict[int, ChoiceFinished] = {}

    @property
    def done(self) -> bool:
        return self._made.done

    def has_finished(self, index: int) -> bool:
        """Return whether a generated choice is complete.

        `index`: number among all generated choices, not only the best ones.
        """
        return self._made.has_finished(index)

    @property
    def completion_tokens(self) -> int:
        """Number of completion tokens over all generated choices."""
        return self._made.completion_tokens

    def take(self, new_tokens: NewTokens) -> Sequence[AnswerEvent]:
        """Return no events until the last tokens have arrived, then all events."""
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
        for rank, end in enumerate(ranked[: self._n]):
            events += self._merged(rank, self._deltas.get(end.index, ()))
            events.append(replace(end, index=rank))
        return events

    def _mean_logprob(self, index: int) -> float:
        return mean_logprob([token.logprob for delta in self._deltas.get(index, ()) for token in delta.logprobs])

    def _merged(self, index: int, deltas: Sequence[Delta]) -> list[AnswerEvent]:
        """Return the deltas of a choice, merged into as few as possible."""
        token_ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
        logprobs = tuple(token for delta in deltas for token in delta.logprobs) if self._with_logprobs else ()
        text = "".join(delta.text for delta in deltas)
        starts = range(0, len(token_ids), DELTA_TOKENS) or range(1)
        return [
            Delta(
                index,
                start,
                token_ids[start : start + DELTA_TOKENS],
                text if start == starts[-1] else "",
                logprobs[start : start + DELTA_TOKENS],
            )
            for start in starts
            if token_ids or text
        ]
