"""Positions at which a text can be cut: its parts, tokenised separately, have the same tokens as the complete text.

A tokenizer first extracts added tokens with `normalized` false. The text between two of them is normalised, split into
words and merged independently of other text. A *mark* is such a token that is recognised in any context, for example a
chat template's turn marker. A text may be cut behind a mark. The next part is tokenised with the mark in front, so that
it has the same context as in the complete text; the token of the mark is then dropped.

A long text without marks is cut between words, if the tokenizer always splits there: before a single space between two
letters, and before a letter at the beginning of a line. Few texts have neither marks nor such positions.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from baton.router.model.chat_template import ChatTemplate

PART_CHARACTERS = 1 << 10
"""Minimum size of a part. Shorter parts cost more lookups; longer parts leave more text behind the last cached part."""
WINDOW_CHARACTERS = 1 << 13
"""Length above which a text without a mark is cut between words. It bounds the time of one tokenisation step."""
MOST_MARKS = 16
"""Maximum number of marks. Some tokenizers have thousands of candidates, each of which takes a trial."""


class TextPart(NamedTuple):
    """Part of a text from `begin` to `end`. It is tokenised from `start`, the position of the mark before it."""

    start: int
    begin: int
    end: int

    @property
    def has_mark(self) -> bool:
        """Whether the first token of the tokenised part is that of the mark, and must be dropped."""
        return self.begin > self.start


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks of a tokenizer. `before`, `after`: special tokens that the tokenizer adds around a text.

    `cuts_words`: long texts without a mark can be cut between words.
    """

    pattern: re.Pattern[str]
    before: tuple[int, ...]
    after: tuple[int, ...]
    part_characters: int = PART_CHARACTERS
    window_characters: int = WINDOW_CHARACTERS
    cuts_words: bool = False

    def parts(self, text: str) -> list[TextPart]:
        """Split a text into parts. Texts with the same beginning have the same parts there, except the last part."""
        parts, start, begin = list[TextPart](), 0, 0
        while (cut := self._cut(text, begin + self.part_characters)) is not None:
            parts.append(TextPart(start, begin, cut.end()))
            start, begin = cut.span()
        return [*parts, TextPart(start, begin, len(text))]

    def _cut(self, text: str, position: int) -> re.Match[str] | None:
        """Return the first cut from `position` on; None without a cut. The first window is never cut between words."""
        is_first = True
        while position < len(text):
            end = position + self.window_characters
            found = self.pattern.search(text, position, end)
            if self.cuts_words and not is_first and end <= len(text):
                between = _BETWEEN_WORDS.search(text, position, end)
                if between is not None and (found is None or between.end() <= found.start()):
                    return between
            if found is not None:
                return found
            position, is_first = end, False
        return None


_LETTER = r"[^\W\d_]"
_BETWEEN_WORDS = re.compile(rf"(?<={_LETTER})(?= {_LETTER})|(?<=\S\n)(?={_LETTER})")
_SPLIT_TOKEN = re.compile(rf"{_LETTER} |\n{_LETTER}")
"""Pattern of an added token that a cut between words could split."""


UNCUT = Marks(re.compile(r"(?!)"), (), ())
"""No marks: every text is one part."""


def find_marks(tokenizer: Tokenizer, template: ChatTemplate | None) -> Marks:
    """Return the marks of a tokenizer that does not truncate or pad; UNCUT if texts cannot be cut, as with BPE dropout.

    Of more than MOST_MARKS marks, those in the chat template are preferred.
    """
    if getattr(tokenizer.model, "dropout", None):
        return UNCUT
    tokens = tokenizer.get_added_tokens_decoder()
    taken_out = {token_id: token for token_id, token in tokens.items() if not token.normalized}

    def rank(token: AddedToken) -> tuple[bool, bool]:
        return template is None or not template.writes(token.content), not token.special

    cuts_words = _splits_words(tokenizer, tokens.values())
    marks = dict[str, int]()
    for token_id, token in sorted(taken_out.items(), key=lambda each: (rank(each[1]), each[0])):
        others = (other.content for other_id, other in taken_out.items() if other_id != token_id)
        if _is_mark(token, others) and _ids(tokenizer, token.content, False) == [token_id]:
            marks[token.content] = token_id
        if len(marks) == MOST_MARKS:
            break
    for content in (*marks, *(_LONE_LETTERS if cuts_words else ())):
        own, whole = _ids(tokenizer, content, False), _ids(tokenizer, content, True)
        if len(own) == 1 and whole.count(own[0]) == 1:  # otherwise the special tokens around it cannot be identified
            place = whole.index(own[0])
            pattern = re.compile("|".join(map(re.escape, marks)) or "(?!)")
            return Marks(pattern, tuple(whole[:place]), tuple(whole[place + 1 :]), cuts_words=cuts_words)
    return UNCUT


_LONE_LETTERS = "aex"
_WORD_MODELS = frozenset({"BPE", "WordPiece", "WordLevel"})  # models that tokenise each word independently
_LOCAL_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase"})  # results independent of text across a cut
_SPLITTERS = frozenset(
    {"Split", "ByteLevel", "Digits", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Punctuation"}
)
_LOOKS_AROUND = re.compile(r"\(\?<|\\[AGKbBzZ]|(?<![\[\\])\^|(?<!\\)\$")
"""Regex constructs (look-around, anchors) whose matches may differ at the beginning or end of a part."""
_PROBES = ("The quick brown", "it's 42 o'clock, isn't it", "x)\nHello", "«Ünï» çode", "I'LL GO ON\nand on", "a1 b2 c d")


def _splits_words(tokenizer: Tokenizer, added: Iterable[AddedToken]) -> bool:
    """Return whether texts can be cut between words, judging by the tokenizer's steps and a trial on some texts."""
    if type(tokenizer.model).__name__ not in _WORD_MODELS or tokenizer.pre_tokenizer is None:
        return False
    normalizers = _steps(tokenizer.normalizer, "normalizers")
    splitters = _steps(tokenizer.pre_tokenizer, "pretokenizers")
    if not all(step["type"] in _LOCAL_NORMALIZERS for step in normalizers):
        return False
    if not all(step["type"] in _SPLITTERS and not step.get("add_prefix_space") for step in splitters):
        return False
    if any(_LOOKS_AROUND.search(step.get("pattern", {}).get("Regex", "")) for step in splitters):
        return False
    for token in added:
        begins, ends = token.content[:1].isalpha(), token.content[-1:].isalpha()
        if _SPLIT_TOKEN.search(token.content) or (token.lstrip and begins) or (token.rstrip and ends):
            return False
    return all(_splits(tokenizer, text, cut.start()) for text in _PROBES for cut in _BETWEEN_WORDS.finditer(text))


def _splits(tokenizer: Tokenizer, text: str, place: int) -> bool:
    pieces = [[piece for piece, _ in _split(tokenizer, part)] for part in (text[:place], text[place:], text)]
    return pieces[0] + pieces[1] == pieces[2]


def _split(tokenizer: Tokenizer, text: str) -> list[tuple[str, tuple[int, int]]]:
    split: list[tuple[str, tuple[int, int]]] = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return split


def _steps(component: Any, name: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer as JSON objects. `name`: key of the steps in a sequence."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    return list(state[name]) if state["type"] == "Sequence" else [state]


def _is_mark(token: AddedToken, others: Iterable[str]) -> bool:
    """Return whether the token's occurrences in a text can never overlap each other or other added tokens."""
    return (
        not token.single_word
        and not _overlap(token.content, token.content)
        and not any(
            other in token.content or token.content in other or _overlap(token.content, other) for other in others
        )
    )


def _overlap(one: str, other: str) -> bool:
    """Return whether the end of either text is a beginning of the other."""
    sizes = range(1, min(len(one), len(other)))
    return any(one.endswith(other[:size]) or other.endswith(one[:size]) for size in sizes)


def _ids(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
