"""A client's part of an answer whose stream broke, and the answer without that: nothing twice, nothing left out.
Pure.

Tokens and text are counted apart, since text lags the tokens by the part that is held back: an incomplete character,
or a possible beginning of a stop string. Both only ever grow at their end, whatever pieces they come in, so two counts
define where to continue.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from router.answer import AnswerEvent, ChoiceFinished, Delta
from router.lifecycle import NotRepeated, Released


@dataclass(frozen=True, slots=True)
class ReceivedChoice:
    """`text_bytes` is the length of its text in UTF-8; `finished`: its end has come."""

    token_ids: tuple[int, ...] = ()
    text_bytes: int = 0
    finished: bool = False


NOTHING = ReceivedChoice()


@dataclass(frozen=True, slots=True)
class Received:
    """By choice; of one that is left out, nothing came. `prompt_tokens`: of the prompt, where it is echoed."""

    choices: Mapping[int, ReceivedChoice] = field(default_factory=dict)
    prompt_tokens: int = 0

    def of(self, choice: int) -> ReceivedChoice:
        return self.choices.get(choice, NOTHING)

    @property
    def finished(self) -> frozenset[int]:
        return frozenset(index for index, choice in self.choices.items() if choice.finished)


class Making(Protocol):
    """An Answer, or a wrapper of one."""

    @property
    def done(self) -> bool: ...
    @property
    def completion_tokens(self) -> int: ...
    def has_finished(self, index: int) -> bool: ...
    def take(self, released: Released) -> Sequence[AnswerEvent]: ...


class ResumedAnswer:
    """`made` makes the whole answer of `n` choices anew; only the part that the client lacks goes out.

    The last end goes out last of all, since usage goes with it.
    """

    def __init__(self, made: Making, n: int, received: Received) -> None:
        self._made = made
        self._cuts = {index: _Cut(choice) for index, choice in received.choices.items()}
        self._finished = received.finished
        self._ends_left = n - len(self._finished)
        self._last_end: ChoiceFinished | None = None  # held while choices that the client has continue

    @property
    def done(self) -> bool:
        return self._made.done

    @property
    def completion_tokens(self) -> int:
        """Of the whole answer, the client's earlier tokens included."""
        return self._made.completion_tokens

    def has_finished(self, index: int) -> bool:
        return self._made.has_finished(index)

    def take(self, released: Released) -> Sequence[AnswerEvent]:
        """Raises: NotRepeated where the answer differs from the client's part."""
        events = [kept for event in self._made.take(released) for kept in self._kept(event)]
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
            raise NotRepeated(f"choice {event.index} ended before the tokens that the client has")
        if event.index in self._finished:
            return
        self._ends_left -= 1
        if self._ends_left:
            yield event
        else:
            self._last_end = event


class _Cut:
    """The part that is still to be left out of one choice."""

    def __init__(self, received: ReceivedChoice) -> None:
        self._token_ids = received.token_ids
        self._passed_tokens = 0
        self._text_bytes = received.text_bytes

    @property
    def is_over(self) -> bool:
        return self._passed_tokens == len(self._token_ids) and not self._text_bytes

    def of(self, delta: Delta) -> Delta | None:
        """The rest of it, if any."""
        had = self._token_ids[self._passed_tokens : self._passed_tokens + len(delta.token_ids)]
        if delta.token_ids[: len(had)] != had:
            raise NotRepeated(f"choice {delta.index} differs from the client's tokens from {delta.offset} on")
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
