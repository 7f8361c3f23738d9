"""Resumption of broken streams: checks what the client says it has, and sends only the rest of the answer. Pure.

A stream is resumed from its journal record, if there is one: a decode worker may still generate the answer, which is
then adopted. Otherwise it is resumed from the original request, if the client sends that again. In both cases the
tokens that the client has do not change.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from baton.process.errors import InvalidArgument
from baton.process.foreign_text import identifier_fault
from baton.router.model.validation import check_token_ids
from baton.router.request.answer import NotRepeated
from baton.router.trace.record import AnswerInProgress
from baton.router.types.events import NewTokens
from baton.router.types.request import GenerationRequest, PreparedRequest
from baton.router.types.response import TOKEN_CHARACTERS, AnswerEvent, ChoiceFinished, Delta


@dataclass(frozen=True, slots=True)
class AttemptLocation:
    """Attempt on a decode worker. The first of its `choices` choices has the number `first_choice`. Output of the
    attempt begins at the offset `answered_tokens`.
    """

    endpoint: str
    attempt_id: int
    first_choice: int = 0
    choices: int = 1
    answered_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReceivedChoice:
    """Part of a choice that the client has received. `text_bytes`: length of the received text in UTF-8; `finished`:
    the client has received the choice's end.
    """

    token_ids: tuple[int, ...] = ()
    text_bytes: int = 0
    finished: bool = False


NOTHING = ReceivedChoice()


@dataclass(frozen=True, slots=True)
class ReceivedAnswer:
    """Part of an answer that the client has received, by choice.

    `prompt_tokens`: received tokens of an echoed prompt.
    """

    choices: Mapping[int, ReceivedChoice] = field(default_factory=dict)
    prompt_tokens: int = 0

    def of(self, choice: int) -> ReceivedChoice:
        return self.choices.get(choice, NOTHING)

    @property
    def finished(self) -> frozenset[int]:
        return frozenset(index for index, choice in self.choices.items() if choice.finished)


class ResumeFilter:
    """Filter of a resumed answer, which passes only what the client has not received.

    Tokens and text are counted separately, because text lags behind by incomplete characters and possible beginnings of
    stop strings. Both only grow at their end, so the two counts define where to continue. The last choice's end is
    withheld until all choices are complete, because the usage is sent with it.
    """

    def __init__(self, made: AnswerInProgress, n: int, received: ReceivedAnswer) -> None:
        self._made = made
        self._cuts = {index: _ChoiceFilter(choice) for index, choice in received.choices.items()}
        self._finished = received.finished
        self._ends_left = n - len(self._finished)
        self._last_end: ChoiceFinished | None = None  # end of the last choice, withheld until all are complete

    @property
    def done(self) -> bool:
        return self._made.done

    @property
    def completion_tokens(self) -> int:
        """Number of tokens of the complete answer, including those that the client already had."""
        return self._made.completion_tokens

    def has_finished(self, index: int) -> bool:
        return self._made.has_finished(index)

    def take(self, new_tokens: NewTokens) -> Sequence[AnswerEvent]:
        """Return the events that the client lacks.

        Raises: NotRepeated if the answer differs from what the client has.
        """
        events = [kept for event in self._made.take(new_tokens) for kept in self._kept(event)]
        if self._last_end is not None and self.done:
            events.append(self._last_end)
            self._last_end = None
        return events

    def _kept(self, event: AnswerEvent) -> Iterator[AnswerEvent]:
        cut = self._cuts.get(event.index)
        if isinstance(event, Delta):
            kept = event if cut is None or cut.is_over else cut.of(event)
            if kept is not None:
                yield kept
            return
        if cut is not None and not cut.is_over:
            raise NotRepeated(f"choice {event.index} ends before the client's last token")
        if event.index in self._finished:
            return
        self._ends_left -= 1
        if self._ends_left:
            yield event
        else:
            self._last_end = event


class _ChoiceFilter:
    """Filter of one choice, which counts the tokens and text that must still be left out."""

    def __init__(self, received: ReceivedChoice) -> None:
        self._token_ids = received.token_ids
        self._passed_tokens = 0
        self._text_bytes = received.text_bytes

    @property
    def is_over(self) -> bool:
        return self._passed_tokens == len(self._token_ids) and not self._text_bytes

    def of(self, delta: Delta) -> Delta | None:
        """Return the part of a delta that the client lacks; None if there is none."""
        had = self._token_ids[self._passed_tokens : self._passed_tokens + len(delta.token_ids)]
        if delta.token_ids[: len(had)] != had:
            raise NotRepeated(
                f"choice {delta.index}: tokens from offset {delta.offset} on differ from those that the client has"
            )
        self._passed_tokens += len(had)
        text = delta.text
        if self._text_bytes:
            encoded = text.encode()
            left_out = min(len(encoded), self._text_bytes)
            self._text_bytes -= left_out
            text = encoded[left_out:].decode(errors="replace")
        begin = len(had)
        if begin == len(delta.token_ids) and not text:
            return None
        return Delta(delta.index, delta.offset + begin, delta.token_ids[begin:], text, delta.logprobs[begin:])


MAX_TEXT_BYTES_PER_TOKEN = 1 << 16  # maximum that a client may report; no tokenizer has a longer token


@dataclass(frozen=True, slots=True)
class ReportedChoice:
    """Received part of a choice as the client reports it, not validated yet."""

    index: int
    token_ids: Sequence[int]
    text_bytes: int
    finished: bool


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """Client's request to resume a stream, not validated yet.

    `request`: original request, if the client sent it again.
    """

    request_id: str
    resume_token: str
    choices: Sequence[ReportedChoice] = ()
    prompt_tokens: int = 0
    request: GenerationRequest | None = None
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Resumption:
    """Continuation of a stream after `received`.

    `router_id`, `places`: earlier router and workers of the answer, if known.
    """

    received: ReceivedAnswer
    router_id: bytes = b""
    places: tuple[AttemptLocation, ...] = ()

    def carried(self, request: PreparedRequest) -> dict[int, tuple[int, ...]]:
        """Return, by choice, the tokens that the client has. Each choice must begin with them.

        Empty for a best-of answer: it is unknown which generated choices the client has.
        """
        if not request.streams:
            return {}
        return {index: choice.token_ids for index, choice in self.received.choices.items() if choice.token_ids}


def check_names(asked: ResumeRequest) -> None:
    """Check request_id and resume_token of a resume request. Raises: InvalidArgument."""
    fault = identifier_fault(asked.request_id)
    if fault or not asked.request_id:
        raise InvalidArgument("request_id", f"{fault or 'is empty'}; use the one in Started")
    if len(asked.resume_token) != TOKEN_CHARACTERS:
        raise InvalidArgument("resume_token", f"must have {TOKEN_CHARACTERS} characters; use the one in Started")


def check_received(asked: ResumeRequest, request: PreparedRequest, vocab_size: int) -> ReceivedAnswer:
    """Return what the client says it has received, after checking it against the request. Raises: InvalidArgument."""
    n = request.n
    if len(asked.choices) > n:
        raise InvalidArgument("choices", f"{len(asked.choices)} choices given, but the request has {n}")
    if asked.prompt_tokens > len(request.token_ids):
        raise InvalidArgument(
            "prompt_tokens", f"{asked.prompt_tokens} exceeds the prompt's {len(request.token_ids)} tokens"
        )
    choices: dict[int, ReceivedChoice] = {}
    for position, choice in enumerate(asked.choices):
        if choice.index >= n or choice.index in choices:
            raise InvalidArgument(
                f"choices[{position}].index", f"{choice.index} is repeated, or not below the number of choices, {n}"
            )
        choices[choice.index] = _choice(f"choices[{position}]", choice, request, vocab_size)
    received = ReceivedAnswer(choices, asked.prompt_tokens)
    if len(received.finished) == n:
        raise InvalidArgument("choices", "all choices have finished; there is nothing to resume")
    return received


def without_sent(request: PreparedRequest, received: ReceivedAnswer) -> PreparedRequest:
    """Remove the request for log-probabilities of the prompt if the client has already received all of them."""
    if received.prompt_tokens < len(request.token_ids):
        return request
    return replace(request, sampling=replace(request.sampling, prompt_logprobs=None))


def _choice(field: str, choice: ReportedChoice, request: PreparedRequest, vocab_size: int) -> ReceivedChoice:
    if len(choice.token_ids) > request.sampling.max_tokens:
        most = request.sampling.max_tokens
        raise InvalidArgument(f"{field}.token_ids", f"{len(choice.token_ids)} exceed the maximum answer of {most}")
    if choice.text_bytes > MAX_TEXT_BYTES_PER_TOKEN * len(choice.token_ids):
        raise InvalidArgument(
            f"{field}.text_bytes", f"{choice.text_bytes} is more text than {len(choice.token_ids)} tokens can have"
        )
    token_ids = check_token_ids(f"{field}.token_ids", choice.token_ids, vocab_size)
    return ReceivedChoice(token_ids, choice.text_bytes, choice.finished)


def adoptable(request: PreparedRequest, resumption: Resumption) -> tuple[AttemptLocation, ...]:
    """Return the earlier router's attempts that can be adopted; for each choice, the newest one.

    An attempt's output begins after the tokens of earlier attempts, so a client that lacks some of these needs a new
    attempt. Log-probabilities of the prompt need a new attempt, too, because they are computed with the prompt.
    """
    if request.sampling.prompt_logprobs is not None:
        return ()
    places: list[AttemptLocation] = []
    left = set(request.choices)
    for place in reversed(resumption.places):
        made = range(place.first_choice, place.first_choice + place.choices)
        carried_tokens = [len(resumption.received.of(choice).token_ids) for choice in made]
        if made and left.issuperset(made) and min(carried_tokens) >= place.answered_tokens:
            places.append(place)
            left.difference_update(made)
    return tuple(places)
