"""Where a text may be cut so that its parts, each tokenised by itself, have the tokens of the whole.

A tokenizer takes added tokens with `normalized` false out of a text before all else. What lies between two of them is
normalised, split into words and merged by itself. A *mark* is such a token that is found wherever it is written,
whatever stands around it: a chat template's turn marker is one. So a text may be cut behind a mark. The next part is
tokenised from that mark on, whose own token is then dropped: all that depends on what is before a part (whether it is
the first one, ends of words, spaces that a mark takes in) is as in the whole text.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer

from baton.router.model.chat_template import ChatTemplate

PART_CHARACTERS = 1 << 10
"""Shorter parts cost more to compare, longer ones more to tokenise again: the end of a text, behind the last cut."""
MOST_MARKS = 16
"""The search for marks tries them one by one, and some tokenizers have thousands."""


class Part(NamedTuple):
    """Of a text, in characters. Tokenised from `start` on, where the mark begins that the part before ends with."""

    start: int
    begin: int
    end: int

    @property
    def has_mark(self) -> bool:
        """The first token is that of the mark."""
        return self.begin > self.start


@dataclass(frozen=True, slots=True)
class Marks:
    """`before` and `after` are the tokens that the tokenizer puts around a text where it adds special tokens."""

    pattern: re.Pattern[str]
    before: tuple[int, ...]
    after: tuple[int, ...]
    part_characters: int = PART_CHARACTERS

    def parts(self, text: str) -> list[Part]:
        """All of the text. Every part but the last ends with a mark, and is the same in all texts that begin so."""
        parts, start, begin = list[Part](), 0, 0
        while (mark := self.pattern.search(text, begin + self.part_characters)) is not None:
            parts.append(Part(start, begin, mark.end()))
            start, begin = mark.span()
        return [*parts, Part(start, begin, len(text))]


UNCUT = Marks(re.compile(r"(?!)"), (), ())
"""Texts are one part each."""


def find_marks(tokenizer: Tokenizer, template: ChatTemplate | None) -> Marks:
    """UNCUT for a tokenizer without marks, and for one that draws lots. Of many marks, those of the template go first.

    The tokenizer neither truncates nor pads.
    """
    if getattr(tokenizer.model, "dropout", None):
        return UNCUT
    tokens = tokenizer.get_added_tokens_decoder()
    taken_out = {token_id: token for token_id, token in tokens.items() if not token.normalized}

    def rank(token: AddedToken) -> tuple[bool, bool]:
        return template is None or not template.writes(token.content), not token.special

    marks = dict[str, int]()
    for token_id, token in sorted(taken_out.items(), key=lambda each: (rank(each[1]), each[0])):
        others = (other.content for other_id, other in taken_out.items() if other_id != token_id)
        if _is_mark(token, others) and _ids(tokenizer, token.content, False) == [token_id]:
            marks[token.content] = token_id
        if len(marks) == MOST_MARKS:
            break
    for content, token_id in marks.items():
        whole = _ids(tokenizer, content, True)
        if whole.count(token_id) == 1:  # else it is unknown which of them is the text
            place = whole.index(token_id)
            pattern = re.compile("|".join(map(re.escape, marks)))
            return Marks(pattern, tuple(whole[:place]), tuple(whole[place + 1 :]))
    return UNCUT


def _is_mark(token: AddedToken, others: Iterable[str]) -> bool:
    """No other token that is taken out can begin, end or lie across it, and no second one of its own kind."""
    return (
        not token.single_word
        and not _overlap(token.content, token.content)
        and not any(
            other in token.content or token.content in other or _overlap(token.content, other) for other in others
        )
    )


def _overlap(one: str, other: str) -> bool:
    """Whether the end of one can be the beginning of the other."""
    sizes = range(1, min(len(one), len(other)))
    return any(one.endswith(other[:size]) or other.endswith(one[:size]) for size in sizes)


def _ids(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
