"""Retained tokens of answers, for routers that adopt them. Pure.

Tokens of a running answer are all retained. Finished answers are retained for a limited time, and up to a limited
number of answers and of tokens.
"""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from baton.decode_worker.gaps import Moment
from baton.engine.request import EndReason, TokenLogprob

Key = TypeVar("Key", bound=Hashable)


class MadeToken(Protocol):
    @property
    def token_id(self) -> int: ...

    @property
    def logprob(self) -> float: ...

    @property
    def top(self) -> Sequence[TokenLogprob]: ...


@dataclass(slots=True)
class RetainedChoice:
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    logged: list[MadeToken] = field(default_factory=list)  # tokens with log-probabilities; empty if not requested
    end: EndReason | None = None
    moment: Moment | None = None  # step of the newest token; None if a prefill worker sampled it


class RetainedOutputs:
    """All tokens of one answer so far. `answered`: tokens that earlier attempts generated."""

    def __init__(self, answered: Sequence[int] = (), with_logprobs: bool = False) -> None:
        self.answered = array("I", answered)
        self.with_logprobs = with_logprobs  # whether the request asked for log-probabilities
        self.choices: dict[int, RetainedChoice] = {}

    def add(self, choice: int, token: MadeToken, end: EndReason | None) -> None:
        retained = self.choices.get(choice)
        if retained is None:
            retained = self.choices[choice] = RetainedChoice()
        retained.token_ids.append(token.token_id)
        retained.end = end
        if self.with_logprobs:
            retained.logged.append(token)

    @property
    def tokens(self) -> int:
        return len(self.answered) + sum(len(retained.token_ids) for retained in self.choices.values())


@dataclass(frozen=True, slots=True)
class RetainedBounds:
    """Maximum number of retained finished answers, and maximum sum of their tokens."""

    answers: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Ended:
    answer: RetainedOutputs
    tokens: int
    expires_at: float  # monotonic seconds


class EndedOutputs(Generic[Key]):
    """Finished answers, each retained for at most `grace_s`. If a bound is exceeded, the oldest answers are dropped."""

    def __init__(self, grace_s: float, bounds: RetainedBounds) -> None:
        self._grace_s = grace_s
        self._bounds = bounds
        self._ended: OrderedDict[Key, Ended] = OrderedDict()  # in order of expiry
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._ended)

    def keep(self, key: Key, answer: RetainedOutputs, now: float) -> None:
        self.take(key, now)
        self._ended[key] = Ended(answer, answer.tokens, now + self._grace_s)
        self.tokens += self._ended[key].tokens
        while len(self._ended) > self._bounds.answers or self.tokens > self._bounds.tokens:
            self._drop_oldest()

    def take(self, key: Key, now: float) -> RetainedOutputs | None:
        """Remove a finished answer from the table and return it; None if it is not retained."""
        self.expire(now)
        ended = self._ended.pop(key, None)
        if ended is None:
            return None
        self.tokens -= ended.tokens
        return ended.answer

    def expire(self, now: float) -> None:
        while self._ended and next(iter(self._ended.values())).expires_at <= now:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, ended = self._ended.popitem(last=False)
        self.tokens -= ended.tokens
