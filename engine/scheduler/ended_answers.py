"""Recently finished answers: a source of drafts for answers with the same salt, since agents repeat themselves. Pure.

The number of kept tokens is limited; the least recently used answer is dropped first. A table of fixed size maps hashes
of a few tokens to their position; newer entries replace older ones. Every hit is compared with the tokens and the salt.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.engine.scheduler.drafts import MAX_MATCH_TOKENS, AnswerSoFar, PromptLookup, continued

MAX_TOKENS = 1 << 18  # maximum number of kept tokens of all answers (1 MiB)
MAX_ANSWER_TOKENS = 1 << 12  # maximum number of kept tokens of one answer: the last ones
PROMPT_TAIL = 64  # maximum number of kept prompt tokens before an answer: the last ones
MATCH_TOKENS = (MAX_MATCH_TOKENS, 4)  # match lengths to look up, the longest first
SLOTS = 1 << 20  # slots of the hash table (8 MiB); each token uses one for each of the two match lengths
TOKENS_PER_CALL = 256  # tokens indexed per call, in 0.5 ms
PLACE_BITS = 16  # low bits of a slot, for the position in an answer; the high bits are the answer's number


@dataclass(frozen=True, slots=True)
class FinishedAnswer:
    """Finished answer with the end of its prompt."""

    salt: bytes
    token_ids: "array[int]"


class Continued(NamedTuple):
    """Draft from a finished answer: the tokens after its match with the newest `alike` tokens of a running one."""

    alike: int
    token_ids: Sequence[int]


class EndedAnswers:
    """Finished answers of one engine. `most_tokens`: maximum total number of kept tokens."""

    def __init__(self, most_tokens: int = MAX_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._kept: OrderedDict[int, FinishedAnswer] = OrderedDict()  # by number from 1, the most recently used last
        self._number = 0
        self._unnoted: deque[tuple[int, int]] = deque()  # answers to index: number, and first position not in the table
        self._slots = array("q")  # table: answer number and position, or 0; allocated with the first answer
        self.tokens = 0  # total number of kept tokens

    def keep(self, salt: bytes, token_ids: Sequence[int], prompt_tokens: int) -> None:
        """Keep a finished answer. `token_ids`: the prompt (`prompt_tokens` tokens), then the answer."""
        begin = max(0, prompt_tokens - PROMPT_TAIL, len(token_ids) - min(MAX_ANSWER_TOKENS, self._most_tokens))
        tail = array("I", token_ids[begin:])
        if len(token_ids) <= prompt_tokens or len(tail) <= min(MATCH_TOKENS):
            return
        if not self._slots:
            self._slots = array("q", bytes(8 * SLOTS))
        self._number += 1
        self._kept[self._number] = FinishedAnswer(salt, tail)
        self._unnoted.append((self._number, 0))
        self.tokens += len(tail)
        while self.tokens > self._most_tokens:
            _, gone = self._kept.popitem(last=False)
            self.tokens -= len(gone.token_ids)

    def note(self, most_tokens: int = TOKENS_PER_CALL) -> None:
        """Index the next `most_tokens` tokens of kept answers."""
        while self._unnoted and most_tokens > 0:
            number, begin = self._unnoted.popleft()
            if (ended := self._kept.get(number)) is None:
                continue
            last = len(ended.token_ids) - 1  # nothing follows the last token
            end = min(last, begin + most_tokens)
            self._note(number, ended, begin, end)
            most_tokens -= end - begin
            if end < last:
                self._unnoted.appendleft((number, end))

    def after(self, salt: bytes, token_ids: Sequence[int], most: int) -> Continued | None:
        """Return a draft of at most `most` next tokens from a finished answer with this salt; None without a match."""
        if not self._kept:
            return None
        for alike in MATCH_TOKENS:
            slot = self._slots[_slot(salt, token_ids[-alike:])] if len(token_ids) >= alike else 0
            number, place = slot >> PLACE_BITS, slot & (1 << PLACE_BITS) - 1
            ended = self._kept.get(number)
            if ended is None or ended.salt != salt:
                continue
            known = _alike(token_ids, ended.token_ids, place)
            if known >= min(MATCH_TOKENS):
                self._kept.move_to_end(number)
                return Continued(known, ended.token_ids[place + 1 : place + 1 + most].tolist())
        return None

    def _note(self, number: int, ended: FinishedAnswer, begin: int, end: int) -> None:
        tokens, slots = ended.token_ids, self._slots
        for place in range(begin, end):
            for alike in MATCH_TOKENS:
                if place + 1 >= alike:
                    before = tokens[place + 1 - alike : place + 1]
                    slots[_slot(ended.salt, before)] = number << PLACE_BITS | place


class SharedLookup:
    """Drafter that continues the longest match, in the answer's own tokens or in a finished answer."""

    def __init__(self) -> None:
        self.ended = EndedAnswers()
        self._own: dict[AnswerSoFar, PromptLookup] = {}

    def drafts_of(self, answers: Sequence[AnswerSoFar], most: Sequence[int]) -> list[Sequence[int]]:
        self.ended.note()
        return [self._draft(answer, count) for answer, count in zip(answers, most, strict=True)]

    def forget(self, answer: AnswerSoFar) -> None:
        self._own.pop(answer, None)
        if answer.cache_root is not None and answer.made_tokens > 0:
            self.ended.keep(answer.cache_root, answer.token_ids, len(answer.token_ids) - answer.made_tokens)

    def _draft(self, answer: AnswerSoFar, most: int) -> Sequence[int]:
        if answer not in self._own:
            self._own[answer] = PromptLookup()
        own = self._own[answer].best(answer.token_ids)
        if most < 1:
            return ()
        alike = 0 if own is None else own.alike
        if answer.cache_root is not None and alike < MAX_MATCH_TOKENS:
            other = self.ended.after(answer.cache_root, answer.token_ids, most)
            if other is not None and other.alike > alike:
                return other.token_ids
        return () if own is None else continued(answer.token_ids, own.place, most)


def _slot(salt: bytes, before: Sequence[int]) -> int:
    return hash((int.from_bytes(salt[:8], "little"), *before)) % SLOTS


def _alike(token_ids: Sequence[int], kept: Sequence[int], place: int) -> int:
    """Return the match length: how many tokens of `kept` up to `place` equal the newest ones of `token_ids`."""
    most = min(MAX_MATCH_TOKENS, place + 1, len(token_ids))
    return next((count for count in range(most) if kept[place - count] != token_ids[-1 - count]), most)
