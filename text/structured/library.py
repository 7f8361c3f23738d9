"""llguidance: vocabularies, and grammars compiled for them. The only module that names it, and it does so when asked.

Its own limits bound what one grammar may cost; they are counts of its steps, so that every process that compiles the
same text comes to the same end. router/model/form_checker.py bounds time and memory in all.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from baton.text.host.files import FileRefused, reading
from baton.text.structured.output import FormRefused, StructuredKind, StructuredOutput, check_form, choices_of

if TYPE_CHECKING:
    from llguidance import LLParserLimits

ANY_OBJECT = '{"type":"object"}'
COMPACT = {
    "whitespace_flexible": False,
    "item_separator": ",",
    "key_separator": ":",
    "json_allowed_escapes": 'nrbtf\\"',  # with \\u a key would have two spellings, and so could come twice
}
MAX_STEP_ITEMS = 10_000  # of the parser, per token
MAX_LEXER_STATES = 50_000  # of 1 to 2 kB each
MAX_GRAMMAR_SYMBOLS = 200_000
MAX_FORCED_BYTES = 256  # that are spelled at once
MESSAGE_CHARACTERS = 300


class LibraryMissing(RuntimeError):
    """llguidance is not installed here: no answer can be held to a form."""


class GrammarFailed(RuntimeError):
    """A grammar that compiled could not be followed to its end: it is too ambiguous, or has no way on."""


class Matcher(Protocol):
    """The beginning of an answer. It stays with one thread at a time. The used part of llguidance's LLMatcher."""

    def deep_copy(self) -> "Matcher": ...

    def is_accepting(self) -> bool:
        """Whether the beginning is a whole answer."""

    def compute_bitmask(self) -> bytes: ...

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int, /) -> None: ...

    def compute_ff_bytes(self) -> bytes: ...

    def compute_ff_tokens(self) -> list[int]: ...

    def consume_tokens(self, sampled_tokens: list[int], /) -> bool: ...

    def validate_tokens(self, tokens: list[int], /) -> int: ...

    def rollback(self, num_tokens: int, /) -> bool: ...

    def is_error(self) -> bool: ...

    def get_error(self) -> str: ...


class Vocabulary:
    """A model's tokens as bytes. Read once; any thread may use it."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """`vocab_size` is that of the model's logits, which may have rows for which there is no token.

        Raises: LibraryMissing, FormRefused for a tokenizer that the library cannot read.
        """
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise LibraryMissing("llguidance is not installed on this worker") from error
        own = sorted(eos_token_ids)
        try:
            with reading(Path("tokenizer.json"), FileRefused):
                self.tokenizer: LLTokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=own or None)
        except FileRefused as error:
            raise FormRefused(f"the model's tokenizer cannot be used: {_short(str(error))}") from error
        self.size = vocab_size
        self.special = frozenset(id for id in range(vocab_size) if self.tokenizer.is_special_token(id)).union(own)
        """Tokens without a text of their own: they end an answer or never come."""
        self.text_bits = (1 << vocab_size) - 1 - _bits(self.special)
        """One bit per token of the vocabulary, the least significant first: those with a text of their own."""

    def ends(self, stop_token_ids: Iterable[int]) -> tuple[int, ...]:
        """Those by which a complete answer may end; the others are text, and part of an answer. Raises: FormRefused."""
        ends = tuple(sorted(self.special.intersection(stop_token_ids)))
        if not ends:
            raise FormRefused("no token is left that could end the answer: it needs the model's end of sequence")
        return ends


def read_vocabulary(folder: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> Vocabulary:
    """Of a checkpoint. Raises: LibraryMissing, FormRefused."""
    try:
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FormRefused(f"the model's tokenizer cannot be read: {error}") from error
    return Vocabulary(text, vocab_size, eos_token_ids)


def compile_form(output: StructuredOutput, vocabulary: Vocabulary) -> Matcher:
    """A matcher before its first token. Blocks, without the interpreter's lock. Raises: FormRefused."""
    from llguidance import LLMatcher

    check_form(output)
    matcher = LLMatcher(vocabulary.tokenizer, _grammar(output), log_level=0, limits=_limits())
    if matcher.is_error():
        raise FormRefused(_fault(output, matcher.get_error()))
    return matcher


def next_tokens(matcher: Matcher) -> bytes:
    """One bit per token of the vocabulary, the least significant first: those that may come now. Drops the lock.

    Tokens that end an answer are among them where the grammar is complete. Raises: GrammarFailed.
    """
    bits = matcher.compute_bitmask()
    if matcher.is_error():
        raise _stuck(matcher)
    return bits


def fill_next_tokens(matcher: Matcher, address: int, size_bytes: int) -> None:
    """The same, into memory of the caller's: 4 bytes for every 32 tokens or part of them. Raises: GrammarFailed."""
    matcher.unsafe_compute_mask_ptr(address, size_bytes)
    if matcher.is_error():
        raise _stuck(matcher)


def forced_tokens(matcher: Matcher) -> list[int]:
    """The tokenizer's spelling of the text that has to follow, as far as it is settled; none where that is long.

    Keeps the lock, a microsecond for every byte. Raises: GrammarFailed.
    """
    if len(matcher.compute_ff_bytes()) > MAX_FORCED_BYTES:
        return []
    token_ids = matcher.compute_ff_tokens()
    if matcher.is_error():
        raise _stuck(matcher)
    return token_ids


def take_tokens(matcher: Matcher, token_ids: Sequence[int]) -> None:
    """Raises: GrammarFailed."""
    if token_ids and not matcher.consume_tokens(list(token_ids)):
        raise _stuck(matcher)


def take_back(matcher: Matcher, count: int) -> None:
    """The newest `count` tokens. Raises: GrammarFailed."""
    if count and not matcher.rollback(count):
        raise _stuck(matcher)


def takeable_tokens(matcher: Matcher, token_ids: Sequence[int]) -> int:
    """How many of them it would take, one after another. Takes none. Raises: GrammarFailed."""
    count = matcher.validate_tokens(list(token_ids)) if token_ids else 0
    if matcher.is_error():
        raise _stuck(matcher)
    return count


def _grammar(output: StructuredOutput) -> str:
    from llguidance import LLMatcher

    match output.kind:
        case StructuredKind.JSON_SCHEMA | StructuredKind.JSON_OBJECT:
            try:
                return LLMatcher.grammar_from_json_schema(output.text or ANY_OBJECT, overrides=COMPACT)  # type: ignore[arg-type]
            except ValueError as error:
                raise FormRefused(_fault(output, str(error))) from error
        case StructuredKind.REGEX:
            return LLMatcher.grammar_from_regex(output.text)
        case StructuredKind.CHOICE:
            texts = " | ".join(json.dumps(text) for text in choices_of(output))
            return LLMatcher.grammar_from_lark(f"start: {texts}")
        case StructuredKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(output.text)
        case StructuredKind.THOUGHTS:
            raise FormRefused("thoughts have no grammar of their own")


def _bits(token_ids: Iterable[int]) -> int:
    """A set of tokens as one number, a bit each."""
    ordered = sorted(token_ids)
    bits = bytearray(ordered[-1] // 8 + 1 if ordered else 0)
    for token_id in ordered:
        bits[token_id // 8] |= 1 << token_id % 8
    return int.from_bytes(bits, "little")


def _limits() -> "LLParserLimits":
    from llguidance import LLParserLimits

    return LLParserLimits(
        step_max_items=MAX_STEP_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SYMBOLS,
        verbose_errors=False,
    )


_TOO_LARGE = ("limit", "too large", "too many", "fuel", "size")
_LARK_PLACE = re.compile(r"(\d+)\((\d+)\)")


def _fault(output: StructuredOutput, message: str) -> str:
    """Why the library does not take the form, without its words: they are of grammars that a client need not know."""
    if any(word in message for word in _TOO_LARGE):
        return "is too large or too ambiguous to be followed"
    match output.kind:
        case StructuredKind.REGEX:
            return "is not a regular expression that can be followed"
        case StructuredKind.GRAMMAR:
            place = _LARK_PLACE.search(message)
            return "is not a grammar that can be followed" + (
                f", from line {place[1]}, column {place[2]}" if place else ""
            )
        case StructuredKind.JSON_SCHEMA:
            return "no answer satisfies it, or it has a pattern that cannot be followed"
    return "cannot be followed"


def _stuck(matcher: Matcher) -> GrammarFailed:
    """Why the form cannot be followed any further, without the library's words."""
    is_large = any(word in matcher.get_error() for word in _TOO_LARGE)
    return GrammarFailed("it is too large or too ambiguous" if is_large else "there is no token to go on with")


def _short(message: str) -> str:
    """The library's words on one line, without the state of its parser."""
    words = message.partition("<state>")[0].partition("<non-verbose/>")[0].split()
    return " ".join(words)[:MESSAGE_CHARACTERS] or "no reason is given"
