"""Interfaces of drafters, and prompt lookup: drafting what followed the same tokens earlier in prompt or answer. Pure.

Prompt lookup (Saxena, "Prompt Lookup Decoding", 2023): answers repeat names, code and quotes of their prompts. Earlier
positions of the newest two tokens form a chain, as in LZ77 coders; of those inspected, the longest match wins, and
among equal ones the newest.
"""

from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol, runtime_checkable

from baton.engine.request import Sample

CANDIDATES = 16  # maximum number of earlier positions to inspect per draft
MAX_MATCH_TOKENS = 8  # longer matches do not count more
TOKENS_PER_CALL = 512  # tokens indexed per call, in 0.5 ms: a long prompt takes several steps
MOST_NOTED = 1 << 16  # only this many tokens at the end of a prompt are indexed


class AnswerSoFar(Hashable, Protocol):
    """Answer that is being generated: the same object in every step, whose tokens only grow."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and generated tokens."""

    def samples(self, drafted: Sequence[int] = ()) -> tuple[Sample, ...]:
        """Return the one sample of the answer's next token. `drafted`: tokens assumed to precede that token."""

    @property
    def cache_root(self) -> bytes | None:
        """Salt: only answers with the same salt may draft for each other. None: the answer drafts for no other."""

    @property
    def made_tokens(self) -> int:
        """Number of generated tokens; the tokens before are the prompt."""

    def reusable_hashes(self, block_tokens: int) -> Sequence[bytes]:
        """Return the hashes of complete blocks before the newest token; none if the answer does not use caches."""


class Drafter(Protocol):
    """Source of drafts for all answers of a worker."""

    def drafts_of(self, answers: Sequence[AnswerSoFar], most: Sequence[int]) -> Sequence[Sequence[int]]:
        """Draft the next tokens of each answer, at most `most` each.

        Wrong drafts cost time and nothing else.
        """

    def forget(self, answer: AnswerSoFar) -> None:
        """Drop the state of a finished answer, if there is any."""


class Offer(NamedTuple):
    """Draft that a draft model can compute."""

    tokens: int  # maximum number of drafted tokens
    is_known: bool = True  # whether the model has computed the answer's earlier tokens; if not, `catch_up` does


@runtime_checkable
class CostlyDrafter(Drafter, Protocol):
    """Drafter that takes noticeable time, so that its cost is weighed before it drafts."""

    def offers(self, answers: Sequence[AnswerSoFar], most: Sequence[int]) -> Sequence[Offer]:
        """Return the possible draft for each answer, without computing it. `answers` begin with the oldest."""

    def seconds(self, tokens: int) -> float:
        """Return the expected time of a drafting pass over one token of each of `tokens` answers."""

    @property
    def begin_s(self) -> float:
        """Extra time of the first pass of a step, which may compute two tokens per answer."""

    @property
    def least_room_s(self) -> float:
        """Minimum `room_s` of `catch_up`: with less per step, the drafter falls further behind the answers."""

    def catch_up(self, answers: Sequence[AnswerSoFar], room_s: float) -> float:
        """Let the drafter process earlier tokens of the answers that it has not seen yet (see Offer), in order.

        Stop after `room_s` seconds. Returns the seconds taken.
        """


class TextDrafter(Protocol):
    """Drafter of one growing sequence of tokens."""

    def draft(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """Draft at most `most` next tokens."""


class PerSequenceDrafter:
    """Drafter with an independent state for each answer."""

    def __init__(self, make: Callable[[], TextDrafter]) -> None:
        self._make = make
        self._of_each: dict[AnswerSoFar, TextDrafter] = {}

    def drafts_of(self, answers: Sequence[AnswerSoFar], most: Sequence[int]) -> list[Sequence[int]]:
        return [
            self._drafter(answer).draft(answer.token_ids, count) for answer, count in zip(answers, most, strict=True)
        ]

    def forget(self, answer: AnswerSoFar) -> None:
        self._of_each.pop(answer, None)

    def _drafter(self, answer: AnswerSoFar) -> TextDrafter:
        if answer not in self._of_each:
            self._of_each[answer] = self._make()
        return self._of_each[answer]


class Place(NamedTuple):
    """Earlier occurrence of the newest `alike` tokens, which ends at position `place`."""

    alike: int
    place: int


class PromptLookup:
    """Prompt lookup over one growing sequence of tokens."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}  # by pair of adjacent tokens: newest position of the second one
        self._before = array("q")  # by position from `_first` on: previous position of the same pair, or 0
        self._first = 0

    def draft(self, token_ids: Sequence[int], most: int) -> list[int]:
        """Draft at most `most` next tokens; none without a match or before all tokens are indexed."""
        best = self.best(token_ids)
        return [] if best is None else continued(token_ids, best.place, most)

    def best(self, token_ids: Sequence[int]) -> Place | None:
        """Return the best match; None if there is none, or not all tokens are indexed yet."""
        if not self._note(token_ids):
            return None
        places = (Place(_alike(token_ids, place), place) for place in islice(self._places(), CANDIDATES))
        return max(places, key=lambda each: each.alike, default=None)

    def _note(self, token_ids: Sequence[int]) -> bool:
        """Index the next tokens. Returns whether all are indexed."""
        if not self._before:
            self._first = max(1, len(token_ids) - MOST_NOTED)
        begin = self._first + len(self._before)
        end = min(len(token_ids), begin + TOKENS_PER_CALL)
        for position in range(begin, end):
            pair = token_ids[position - 1] << 32 | token_ids[position]
            self._before.append(self._newest.get(pair, 0))
            self._newest[pair] = position
        return 0 < len(self._before) == len(token_ids) - self._first

    def _places(self) -> Iterator[int]:
        """Iterate over the earlier positions of the newest two tokens, the newest first."""
        place = self._before[-1]
        while place:
            yield place
            place = self._before[place - self._first]


def _alike(token_ids: Sequence[int], place: int) -> int:
    """Count the tokens that end at `place` and equal those at the end."""
    count, last = 2, len(token_ids) - 1
    while count < MAX_MATCH_TOKENS and count <= place and token_ids[place - count] == token_ids[last - count]:
        count += 1
    return count


def continued(token_ids: Sequence[int], place: int, most: int) -> list[int]:
    """Return `most` tokens after `place`; after the last token, the draft repeats from its start."""
    drafted: list[int] = []
    for position in range(place + 1, place + 1 + most):
        known = position < len(token_ids)
        drafted.append(token_ids[position] if known else drafted[position - len(token_ids)])
    return drafted
