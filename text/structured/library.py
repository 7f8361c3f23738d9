"""Vocabularies and compiled grammars of llguidance. Only this module imports the library, and only on demand.

The library's limits bound the cost of a grammar in steps, not in time, so that every process that compiles a grammar
gets the same result. router/model/form_checker.py bounds time and memory.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from baton.text.host.files import FileRefused, reading
from baton.text.structured.output import FormRefused, StructuredKind, StructuredOutput, check_form, choices_of
from baton.text.tokenizer.checkpoint_tokenizer import TokenizerRefused, read_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher as LLMatcher
    from llguidance import LLParserLimits

ANY_OBJECT = '{"type":"object"}'
COMPACT = {
    "whitespace_flexible": False,
    "item_separator": ",",
    "key_separator": ":",
    "json_allowed_escapes": 'nrbtf\\"',  # excludes \\u, with which a key could be written in two ways
}
MAX_STEP_ITEMS = 10_000  # maximum parser items per token
MAX_LEXER_STATES = 50_000  # maximum lexer states, of 1 to 2 kB each
MAX_GRAMMAR_SYMBOLS = 200_000
MAX_FORCED_BYTES = 256  # maximum bytes of a forced text; a longer text is not tokenised
MESSAGE_CHARACTERS = 300
PLAIN_TOKEN = re.compile("(?!<0x)[!-~]+")  # ASCII without space, which every kind of vocabulary writes as it is
MAX_ADDED_TOKENS = 10_000  # added tokens that the library reads in 1 s; its time grows with the square of their number


class LibraryMissing(RuntimeError):
    """Error: structured output is not available, since llguidance is not installed."""


class GrammarFailed(RuntimeError):
    """Error: a compiled grammar is too ambiguous, or allows no next token."""


class Vocabulary:
    """Tokens of a model as bytes, for compiling grammars. Thread-safe."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """Read the tokenizer. `vocab_size`: number of the model's logits, some of which may have no token.

        Raises: LibraryMissing, FormRefused for a tokenizer that the library cannot read.
        """
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise LibraryMissing("llguidance is not installed on this worker") from error
        own = sorted(eos_token_ids)
        try:
            with reading(Path("tokenizer.json"), FileRefused):
                self.tokenizer: LLTokenizer = LLTokenizer(
                    _with_few_added_tokens(tokenizer_json), n_vocab=vocab_size, eos_token=own or None
                )
        except FileRefused as error:
            raise FormRefused(f"the model's tokenizer cannot be used: {_short(str(error))}") from error
        self.size = vocab_size
        self.special = frozenset(id for id in range(vocab_size) if self.tokenizer.is_special_token(id)).union(own)
        """Tokens without text, which may only end an answer."""
        self.text_bits = (1 << vocab_size) - 1 - _bits(self.special)
        """Tokens with text, one bit per token, least significant first."""

    def ends(self, stop_token_ids: Iterable[int]) -> tuple[int, ...]:
        """Return the stop tokens without text, with which an answer can end. Raises: FormRefused if there are none."""
        ends = tuple(sorted(self.special.intersection(stop_token_ids)))
        if not ends:
            raise FormRefused("no stop token can end the answer: keep the model's end of sequence token")
        return ends


def read_vocabulary(folder: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> Vocabulary:
    """Return the vocabulary of a checkpoint. Raises: LibraryMissing, FormRefused."""
    try:
        found = read_tokenizer(folder)
    except TokenizerRefused as error:
        raise FormRefused(f"the model's tokenizer cannot be read: {error}") from error
    ends = found.end_token_ids.union(eos_token_ids)
    return Vocabulary(found.json, vocab_size, (each for each in ends if each < vocab_size))


def _with_few_added_tokens(tokenizer_json: str) -> str:
    """Return the tokenizer with its plain added tokens in the vocabulary if it has more than MAX_ADDED_TOKENS of them.

    Grammars see the same bytes of each token, and take those in angle brackets for text, too. Forced text, which any
    tokens may spell, is tokenised without them. A tokenizer whose added tokens have characters that a vocabulary could
    write in another way stays as it is.
    """
    if tokenizer_json.count('"single_word"') <= MAX_ADDED_TOKENS:
        return tokenizer_json
    tokenizer = json.loads(tokenizer_json)
    added, vocabulary = tokenizer["added_tokens"], tokenizer["model"]["vocab"]
    if not isinstance(vocabulary, dict) or not all(PLAIN_TOKEN.fullmatch(each["content"]) for each in added):
        return tokenizer_json
    vocabulary.update({each["content"]: each["id"] for each in added})  # with special ones, which keep their numbers
    return json.dumps(tokenizer | {"added_tokens": [each for each in added if each["special"]]})


def compile_form(output: StructuredOutput, vocabulary: Vocabulary) -> "LLMatcher":
    """Compile structured output; return a matcher that has consumed no token. Blocks, but releases the GIL.

    Raises: FormRefused.
    """
    from llguidance import LLMatcher

    check_form(output)
    matcher = LLMatcher(vocabulary.tokenizer, _grammar(output), log_level=0, limits=_limits())
    if matcher.is_error():
        raise FormRefused(_fault(output, matcher.get_error()))
    return matcher


def next_tokens(matcher: "LLMatcher") -> bytes:
    """Return the allowed next tokens as bits, the least significant first. Releases the GIL.

    If the answer may end here, tokens that end it are included. Raises: GrammarFailed.
    """
    bits = matcher.compute_bitmask()
    if matcher.is_error():
        raise _stuck(matcher)
    return bits


def fill_next_tokens(matcher: "LLMatcher", address: int, size_bytes: int) -> None:
    """Write the bits of `next_tokens` to the caller's memory, 4 bytes per 32 tokens. Raises: GrammarFailed."""
    matcher.unsafe_compute_mask_ptr(address, size_bytes)
    if matcher.is_error():
        raise _stuck(matcher)


def forced_tokens(matcher: "LLMatcher") -> list[int]:
    """Return the tokens of the text that must follow, up to the first ambiguous token; none for a too long text.

    Holds the GIL for about 1 µs per byte. Raises: GrammarFailed.
    """
    if len(matcher.compute_ff_bytes()) > MAX_FORCED_BYTES:
        return []
    token_ids = matcher.compute_ff_tokens()
    if matcher.is_error():
        raise _stuck(matcher)
    return token_ids


def take_tokens(matcher: "LLMatcher", token_ids: Sequence[int]) -> None:
    """Make the matcher consume these tokens. Raises: GrammarFailed."""
    if token_ids and not matcher.consume_tokens(list(token_ids)):
        raise _stuck(matcher)


def take_back(matcher: "LLMatcher", count: int) -> None:
    """Make the matcher forget the `count` tokens that it consumed last. Raises: GrammarFailed."""
    if count and not matcher.rollback(count):
        raise _stuck(matcher)


def takeable_tokens(matcher: "LLMatcher", token_ids: Sequence[int]) -> int:
    """Return how many of these tokens are allowed in sequence, without consuming them. Raises: GrammarFailed."""
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
            raise FormRefused("reasoning has no grammar of its own")


def _bits(token_ids: Iterable[int]) -> int:
    """Return a set of tokens as one number with a bit per token."""
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
    """Return why the library rejects a schema, regular expression or grammar.

    The library's own message is not used, since it describes an internal grammar.
    """
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


def _stuck(matcher: "LLMatcher") -> GrammarFailed:
    """Return the error of a matcher that failed, without the library's message."""
    is_large = any(word in matcher.get_error() for word in _TOO_LARGE)
    return GrammarFailed("it is too large or too ambiguous" if is_large else "no token can follow")


def _short(message: str) -> str:
    """Return the library's message on one line, without the description of its parser's state."""
    words = message.partition("<state>")[0].partition("<non-verbose/>")[0].split()
    return " ".join(words)[:MESSAGE_CHARACTERS] or "no reason is given"
