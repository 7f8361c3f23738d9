"""Who drafts an answer's next tokens; and drafts out of its own prompt and answer: what followed the same tokens. Pure.

Prompt lookup (Saxena, "Prompt Lookup Decoding", 2023): answers repeat names, code and quotes of their prompts. Earlier
places of the newest two tokens hang together in a chain, as in coders of LZ77; of those looked at, the one that agrees
with the most tokens before them wins, and of equal ones the newest.
"""

from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol, runtime_checkable

from baton.engine.request import Sample

CANDIDATES = 16  # places that are looked at
MAX_MATCH_TOKENS = 8  # tokens: more do not count
TOKENS_PER_CALL = 512  # tokens, in half a millisecond: long prompts are noted over several steps
MOST_NOTED = 1 << 16  # tokens of the end of a prompt


class AnswerSoFar(Hashable, Protocol):
    """An answer that is being made, the same object at every step. Its tokens only grow."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Of its prompt, and those made since."""

    def samples(self, drafted: Sequence[int] = ()) -> tuple[Sample, ...]:
        """How its next token is drawn: one sample. `drafted`: tokens that are taken to come before it."""

    @property
    def cache_root(self) -> bytes | None:
        """Only answers with the same one may draft for each other. None: keeps to itself."""

    @property
    def made_tokens(self) -> int:
        """The last ones: the others are its prompt."""

    def reusable_hashes(self, block_tokens: int) -> Sequence[bytes]:
        """Of its complete blocks before the newest token; none where it keeps out of caches."""


class Drafter(Protocol):
    """Of all answers of a worker."""

    def drafts_of(self, answers: Sequence[AnswerSoFar], most: Sequence[int]) -> Sequence[Sequence[int]]:
        """Of each answer of a step at most so many tokens that may come next.

        They need not be right: a wrong one costs time and nothing else.
        """

    def forget(self, answer: AnswerSoFar) -> None:
        """It has ended; it may never have been here."""


class Offer(NamedTuple):
    """What can be drafted of an answer."""

    tokens: int  # at most
    is_known: bool = True  # False: once its earlier tokens are computed, by `catch_up`


@runtime_checkable
class CostlyDrafter(Drafter, Protocol):
    """One that computes for its drafts: how many are worth it is decided before."""

    def offers(self, answers: Sequence[AnswerSoFar], most: Sequence[int]) -> Sequence[Offer]:
        """Of each answer of a step, the oldest first; nothing is computed."""

    def seconds(self, tokens: int) -> float:
        """Expected of a pass over the newest token of so many answers, which drafts the next of each."""

    @property
    def begin_s(self) -> float:
        """By which the first pass of a step is expected to take longer: it may compute two tokens of an answer."""

    @property
    def least_room_s(self) -> float:
        """In which `catch_up` computes more tokens than an answer makes in a step: in less it may do nothing."""

    def catch_up(self, answers: Sequence[AnswerSoFar], room_s: float) -> float:
        """Computes earlier tokens of answers that are not known yet, the first ones first, in `room_s` seconds at most.

        Returns the seconds that it took.
        """


class TextDrafter(Protocol):
    """Of one sequence of tokens, which only grows."""

    def draft(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """At most `most` tokens that may come next."""


class PerSequenceDrafter:
    """Drafts each answer out of its own tokens."""

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
    """Where the newest tokens, `alike` so many of them, stood before: the position of the last."""

    alike: int
    place: int


class PromptLookup:
    """Of one sequence of tokens, which only grows."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}  # by two tokens: the position of the second, where they stood last
        self._before = array("q")  # from _first on: where the two tokens that end here stood before; 0: nowhere
        self._first = 0

    def draft(self, token_ids: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may come next; none where nothing is alike, or not all is noted yet."""
        best = self.best(token_ids)
        return [] if best is None else continued(token_ids, best.place, most)

    def best(self, token_ids: Sequence[int]) -> Place | None:
        """None where nothing is alike, or not all is noted yet."""
        if not self._note(token_ids):
            return None
        places = (Place(_alike(token_ids, place), place) for place in islice(self._places(), CANDIDATES))
        return max(places, key=lambda each: each.alike, default=None)

    def _note(self, token_ids: Sequence[int]) -> bool:
        """Whether all tokens are noted now."""
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
        """Positions at which the newest two tokens ended before, the newest first."""
        place = self._before[-1]
        while place:
            yield place
            place = self._before[place - self._first]


def _alike(token_ids: Sequence[int], place: int) -> int:
    """How many tokens up to `place` are those at the end."""
    count, last = 2, len(token_ids) - 1
    while count < MAX_MATCH_TOKENS and count <= place and token_ids[place - count] == token_ids[last - count]:
        count += 1
    return count


def continued(token_ids: Sequence[int], place: int, most: int) -> list[int]:
    """What follows `place`; where that reaches the end, the draft repeats itself."""
    drafted: list[int] = []
    for position in range(place + 1, place + 1 + most):
        known = position < len(token_ids)
        drafted.append(token_ids[position] if known else drafted[position - len(token_ids)])
    return drafted
