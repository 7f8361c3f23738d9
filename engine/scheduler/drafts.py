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

CANDIDATES = 16  # positions to inspect
MAX_MATCH_TOKENS = 8  # longer matches do not count more
TOKENS_PER_CALL = 512  # 0.5 ms: long prompts are indexed over several steps
MOST_NOTED = 1 << 16  # tokens of the end of a prompt


class AnswerSoFar(Hashable, Protocol):
    """Answer being generated, the same object in every step. Its tokens only grow."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and generated tokens."""

    def samples(self, drafted: Sequence[int] = ()) -> tuple[Sample, ...]:
        """Return the one sample of its next token. `drafted`: tokens assumed to precede it."""

    @property
    def cache_root(self) -> bytes | None:
        """Salt: only answers with the same one may draft for each other. None: for none."""

    @property
    def made_tokens(self) -> int:
        """Number of generated tokens; the tokens before are the prompt."""

    def reusable_hashes(self, block_tokens: int) -> Sequence[bytes]:
        """Return the hashes of complete blocks before the newest token; none if it does not use caches."""


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

    tokens: int  # maximum
    is_known: bool = True  # whether its earlier tokens are computed; if not, `catch_up` does that


@runtime_checkable
class CostlyDrafter(Drafter, Protocol):
    """Drafter with its own computation, whose cost is weighed before it drafts."""

    def offers(self, answers: Sequence[AnswerSoFar], most: Sequence[int]) -> Sequence[Offer]:
        """Return what it could draft for each answer, the oldest first, without computing."""

    def seconds(self, tokens: int) -> float:
        """Return the expected time of a pass over the newest token of `tokens` answers."""

    @property
    def begin_s(self) -> float:
        """Extra time of the first pass of a step, which may compute two tokens per answer."""

    @property
    def least_room_s(self) -> float:
        """Shortest time in which `catch_up` computes more tokens than an answer generates per step."""

    def catch_up(self, answers: Sequence[AnswerSoFar], room_s: float) -> float:
        """Compute earlier tokens of unknown answers, in order, for at most `room_s` seconds.

        Returns the seconds taken.
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
    """Earlier position of the newest `alike` tokens: that of the last one."""

    alike: int
    place: int


class PromptLookup:
    """Prompt lookup over one growing sequence of tokens."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}  # last position of each pair of tokens, by its second token
        self._before = array("q")  # from _first on: previous position of the same pair; 0 if there is none
        self._first = 0

    def draft(self, token_ids: Sequence[int], most: int) -> list[int]:
        """Draft at most `most` next tokens; none without a match or before all tokens are indexed."""
        best = self.best(token_ids)
        return [] if best is None else continued(token_ids, best.place, most)

    def best(self, token_ids: Sequence[int]) -> Place | None:
        """Return the best match, or None without one or before all tokens are indexed."""
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
    """Count the tokens up to `place` that equal those at the end."""
    count, last = 2, len(token_ids) - 1
    while count < MAX_MATCH_TOKENS and count <= place and token_ids[place - count] == token_ids[last - count]:
        count += 1
    return count


def continued(token_ids: Sequence[int], place: int, most: int) -> list[int]:
    """Return the tokens after `place`; a draft that reaches the end repeats itself."""
    drafted: list[int] = []
    for position in range(place + 1, place + 1 + most):
        known = position < len(token_ids)
        drafted.append(token_ids[position] if known else drafted[position - len(token_ids)])
    return drafted
