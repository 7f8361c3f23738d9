"""One request's streams: outputs in any order, with repeats, become contiguous tokens of each choice. Pure.

Token 2 (from decode) may overtake token 1 (from prefill), decode repeats prefill's tokens, a reconnected session may
repeat anything, and another attempt continues where the one before failed, or begins from the first token. The output
has every offset once, in order. Each choice takes tokens of one attempt at a time; those of others are dropped.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.router.types.events import End, NewTokens, SequenceOutput, TokenLogprob


class InconsistentOutput(Exception):
    """A worker broke the protocol: unknown choice, tokens past an end, or another token at an offset given before."""


class NotRepeated(InconsistentOutput):
    """Another attempt made another token than the one that an earlier attempt gave out."""


@dataclass(slots=True)
class _Choice:
    attempt_id: int = 0  # that makes it; 0: none
    token_ids: list[int] = field(default_factory=list)  # released
    carried: int = 0  # of these, by earlier attempts
    waiting: dict[int, int] = field(default_factory=dict)  # offset -> token, beyond a gap
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by offset, of tokens not released
    length: int | None = None  # known with the end
    end: End | None = None

    @property
    def done(self) -> bool:
        return self.length is not None and len(self.token_ids) == self.length

    def begin(self, attempt_id: int) -> None:
        """Only released tokens are kept for another attempt."""
        self.attempt_id = attempt_id
        self.waiting.clear()
        self.logprobs.clear()
        self.carried = len(self.token_ids)
        if not self.done:
            self.length = self.end = None

    def contradiction(self, offset: int, message: str) -> InconsistentOutput:
        return NotRepeated(message) if offset < self.carried else InconsistentOutput(message)


class TokenStream:
    """The choices of one request, from the first token to the last, over all its attempts."""

    def __init__(self, choices: int) -> None:
        self._choices = [_Choice() for _ in range(choices)]

    def begin(self, attempt_id: int, choices: Iterable[int] | None = None) -> None:
        """From now on only this attempt counts, for these choices or for all. Tokens released stay released.

        It may begin at or before the last of them, and must then repeat the same tokens.
        """
        for choice in self._choices if choices is None else [self._choices[index] for index in choices]:
            choice.begin(attempt_id)

    def leave(self, attempt_id: int) -> None:
        """Outputs of this attempt are ignored from now on."""
        for choice in self._choices:
            if choice.attempt_id == attempt_id:
                choice.attempt_id = 0

    def prime(self, index: int, token_ids: tuple[int, ...]) -> NewTokens:
        """These first tokens of a choice were given out before there was this stream."""
        self._choices[index].token_ids.extend(token_ids)
        return NewTokens(index, 0, token_ids, None)

    def finish(self, index: int, end: End) -> NewTokens:
        """A choice of which everything was released turns out to have ended there."""
        choice = self._choices[index]
        choice.length, choice.end = len(choice.token_ids), end
        stop_token_id = choice.token_ids[-1] if end is End.STOP else None
        return NewTokens(index, len(choice.token_ids), (), end, stop_token_id=stop_token_id)

    def released(self, index: int) -> int:
        """How many tokens of a choice were."""
        return len(self._choices[index].token_ids)

    def answer(self, index: int) -> tuple[int, ...]:
        """The tokens of a choice that were released."""
        return tuple(self._choices[index].token_ids)

    def take_all(self, outputs: deque[SequenceOutput]) -> tuple[NewTokens, ...]:
        """The tokens that became contiguous with these, one NewTokens for each choice that has any.

        They are taken from `outputs`, up to one that is inconsistent: where others before it released something, it
        stays there for the next call. Those of other attempts are dropped. Raises: InconsistentOutput.
        """
        begins: dict[int, int] = {}  # where the released tokens begin, by choice
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

    def _take(self, output: SequenceOutput, begins: dict[int, int]) -> None:
        if output.choice >= len(self._choices):
            raise InconsistentOutput(f"choice {output.choice} of {len(self._choices)}")
        choice = self._choices[output.choice]
        if output.attempt_id != choice.attempt_id:
            return
        token_ids, waiting = choice.token_ids, choice.waiting
        begins.setdefault(output.choice, len(token_ids))
        if output.offset == len(token_ids) and not waiting and choice.length is None and output.end is None:
            token_ids.extend(output.token_ids)  # the next ones, as nearly all of them are
            if output.logprobs:
                choice.logprobs.update(enumerate(output.logprobs, start=output.offset))
            return
        self._store(choice, output)
        while (token_id := waiting.pop(len(token_ids), None)) is not None:
            token_ids.append(token_id)

    def _release(self, begins: dict[int, int]) -> tuple[NewTokens, ...]:
        """Raises: InconsistentOutput where only some tokens of a choice have log-probabilities."""
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
                    raise InconsistentOutput(f"choice {index} tells some log-probabilities and not others")
            released.append(NewTokens(index, begin, fresh, choice.end if choice.done else None, logprobs))
        return tuple(released)

    def _store(self, choice: _Choice, output: SequenceOutput) -> None:
        beyond = output.offset + len(output.token_ids)
        if output.end is not None:
            if choice.length not in (None, beyond):
                message = f"choice {output.choice} ends at {choice.length} and at {beyond}"
                raise choice.contradiction(min(choice.length or beyond, beyond) - 1, message)
            choice.length, choice.end = beyond, output.end
        if choice.length is not None and max(beyond, len(choice.token_ids)) > choice.length:
            message = f"choice {output.choice} goes on past its end at {choice.length}"
            raise choice.contradiction(choice.length - 1, message)
        for offset, token_id in enumerate(output.token_ids, start=output.offset):
            known = choice.token_ids[offset] if offset < len(choice.token_ids) else choice.waiting.get(offset)
            if known is None:
                choice.waiting[offset] = token_id
            elif known != token_id:
                message = f"choice {output.choice} has two tokens at {offset}"  # which ones is for no log
                raise choice.contradiction(offset, message)
        for offset, logprob in enumerate(output.logprobs, start=output.offset):
            if offset >= len(choice.token_ids):
                choice.logprobs.setdefault(offset, logprob)
