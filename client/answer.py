"""Check of an answer's events against the protocol, and assembly of the complete answer. Pure.

The protocol requires this order: one Started; parts of the prompt, if any, with contiguous offsets from 0; deltas with
contiguous offsets from 0 per choice; one Finished per choice, as the choice's last event. Only the last Finished of the
answer has usage and timings.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.client.errors import ProtocolError
from baton.client.types import (
    CallBegins,
    CallPart,
    Choice,
    Completion,
    Delta,
    Event,
    Finished,
    PromptPart,
    Started,
    ThoughtPart,
    TokenLogprob,
    ToldPrompt,
    ToolCall,
)


@dataclass(slots=True)
class ReceivedTokens:
    """Tokens, text bytes and tool calls received so far for one choice."""

    token_ids: list[int] = field(default_factory=list)
    text_bytes: int = 0  # bytes of text, reasoning and arguments
    finished: bool = False
    calls: int = 0


class Continuity:
    """State of a received answer. Raises ProtocolError at the first event that breaks the protocol."""

    def __init__(self, choices: int) -> None:
        self._choices = choices
        self.started: Started | None = None
        self.prompt_tokens = 0  # received tokens of the echoed prompt
        self.received: dict[int, ReceivedTokens] = {}  # received tokens by index of the choice

    def accept(self, event: Event) -> None:
        match event:
            case Started():
                if self.started is not None:
                    raise ProtocolError("the server sent Started twice")
                self.started = event
            case PromptPart():
                self._check_part(event)
                self.prompt_tokens += len(event.token_ids)
            case Delta():
                received = self._open(event.index)
                self._check_offset(event, len(received.token_ids))
                received.token_ids += event.token_ids
                received.text_bytes += len(event.text.encode())
            case ThoughtPart():
                self._open(event.index).text_bytes += len(event.text.encode())
            case CallBegins():
                received = self._open(event.index)
                if event.call != received.calls:
                    raise ProtocolError(
                        f"choice {event.index}: call {event.call} begins instead of call {received.calls}"
                    )
                received.calls += 1
            case CallPart():
                received = self._open(event.index)
                if event.call != received.calls - 1:
                    raise ProtocolError(
                        f"choice {event.index}: arguments of call {event.call}, which is not the newest"
                    )
                received.text_bytes += len(event.arguments.encode())
            case Finished():
                self._open(event.index).finished = True
                if (event.usage is not None, event.timings is not None) != (self.is_whole, self.is_whole):
                    raise ProtocolError("usage and timings belong to the last Finished of an answer, and to no other")

    @property
    def is_whole(self) -> bool:
        return self._ended == self._choices

    @property
    def _ended(self) -> int:
        return sum(each.finished for each in self.received.values())

    def end(self) -> None:
        """Check the answer after the stream closed with status OK. Raises: ProtocolError if it is incomplete."""
        if not self.is_whole:
            raise ProtocolError(f"the stream closed with {self._ended} of {self._choices} choices finished")

    def _open(self, index: int) -> ReceivedTokens:
        if self.started is None:
            raise ProtocolError("the answer does not begin with Started")
        received = self.received.setdefault(index, ReceivedTokens())
        if index >= self._choices or received.finished:
            raise ProtocolError(f"choice {index} was not requested or has finished already")
        return received

    def _check_part(self, part: PromptPart) -> None:
        if self.started is None or self.received:
            raise ProtocolError("the server sent a part of the prompt before Started or after the answer began")
        if part.offset != self.prompt_tokens:
            raise ProtocolError(f"the prompt continues at token {part.offset} instead of {self.prompt_tokens}")

    def _check_offset(self, delta: Delta, expected: int) -> None:
        if delta.offset != expected:
            fault = "repeated" if delta.offset < expected else "lost"
            raise ProtocolError(
                f"tokens {fault}: offset {delta.offset} after {expected} tokens of choice {delta.index}"
            )


@dataclass(slots=True)
class _Pieces:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: Finished | None = None
    thoughts: list[str] = field(default_factory=list)
    calls: list[CallBegins] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)  # JSON texts by index of the call


def completion_from(events: Sequence[Event]) -> Completion:
    """Return the complete answer from all events of a stream. Raises: ProtocolError if it is incomplete."""
    started: Started | None = None
    last: Finished | None = None
    parts: list[PromptPart] = []
    pieces: dict[int, _Pieces] = {}
    for event in events:
        match event:
            case Started():
                started = event
            case PromptPart():
                parts.append(event)
            case Delta():
                piece = pieces.setdefault(event.index, _Pieces())
                piece.texts.append(event.text)
                piece.token_ids += event.token_ids
                piece.logprobs += event.logprobs or ()
            case ThoughtPart():
                pieces.setdefault(event.index, _Pieces()).thoughts.append(event.text)
            case CallBegins():
                piece = pieces.setdefault(event.index, _Pieces())
                piece.calls.append(event)
                piece.arguments.append("")
            case CallPart():
                pieces.setdefault(event.index, _Pieces()).arguments[event.call] += event.arguments
            case Finished():
                pieces.setdefault(event.index, _Pieces()).finished = last = event
    if started is None or last is None or last.usage is None or last.timings is None:
        raise ProtocolError("the answer is incomplete")
    prompt = _joined_prompt(parts) if parts else None
    choices = tuple(_choice(index, pieces[index], prompt.text if prompt else "") for index in sorted(pieces))
    return Completion(started.request_id, started.model, started.seed, choices, last.usage, last.timings, prompt)


def _joined_prompt(parts: Sequence[PromptPart]) -> ToldPrompt:
    token_ids = tuple(token_id for part in parts for token_id in part.token_ids)
    logprobs = tuple(token for part in parts for token in part.logprobs or ())
    if len(logprobs) not in (0, len(token_ids) - 1):
        raise ProtocolError("log-probabilities are missing for some tokens of the prompt")
    return ToldPrompt(token_ids, "".join(part.text for part in parts), logprobs or None)


def _choice(index: int, piece: _Pieces, prompt: str) -> Choice:
    if piece.finished is None:
        raise ProtocolError(f"choice {index} is incomplete")
    finished = piece.finished
    if len(piece.logprobs) not in (0, len(piece.token_ids)):
        raise ProtocolError(f"log-probabilities are missing for some tokens of choice {index}")
    return Choice(
        index,
        prompt + "".join(piece.texts),
        tuple(piece.token_ids),
        finished.reason,
        finished.matched_stop,
        tuple(piece.logprobs) or None,
        "".join(piece.thoughts),
        tuple(ToolCall(each.id, each.name, piece.arguments[each.call]) for each in piece.calls),
    )
