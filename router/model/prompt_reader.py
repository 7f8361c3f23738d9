"""Tokenisation and hashing of prompts. The work for prefixes of earlier prompts is not repeated.

The result is always the same as for the complete text. Prompts take turns on the tokenizer's thread. A long part that
cannot be cut is tokenised on another thread.
"""

import sys
from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from tokenizers import Encoding, Tokenizer

from baton.router.model.known_prompts import Kept, KnownPrompts, part_keys
from baton.router.model.marks import Marks
from baton.text.block_hash import HashChain
from baton.text.packed_tokens import TokenPacker

AT_ONCE_CHARACTERS = 1 << 14
LONG_BYTES = 1 << 16
"""Size above which a part of a text is long: tokenising it takes tens of milliseconds."""
SLICE_BYTES = 1 << 14
COUNTED_TOKENS = 1 << 14
"""A too long text is counted exactly up to this number of tokens, or up to twice the limit if that is more."""
CUT_TOKENS = 16  # maximum number of tokens that a slice has only because the text is cut


class TextTooLong(Exception):
    """Error: the text has more tokens than allowed, namely at least `least_tokens`."""

    def __init__(self, least_tokens: int, counted: bool = False) -> None:
        """Create the error. `counted`: whether `least_tokens` is the exact number."""
        super().__init__(f"{least_tokens} tokens" if counted else f"at least {least_tokens} tokens")
        self.least_tokens = least_tokens
        self.counted = counted


class ReadPrompt(NamedTuple):
    token_ids: tuple[int, ...]
    block_hashes: tuple[bytes, ...]  # hashes of all complete blocks
    packed_tokens: bytes  # token_ids in protobuf's packed encoding


class LongPart(NamedTuple):
    """Long part of a text. The caller must tokenise it with `encode`, on a thread for long texts."""

    text: str
    add_special_tokens: bool
    size_bytes: int


Reading: TypeAlias = Generator["ReadPrompt | LongPart | None", "Encoding | None"]
"""Generator that reads a prompt in steps. It yields None when other prompts may have a turn, a LongPart for which its
Encoding must be sent, and finally the ReadPrompt.
"""


class PromptReader:
    """Tokenises and hashes prompts with a cache of prefixes.

    Totals over all prompts: `known_tokens` came from the cache, `read_tokens` were tokenised.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Marks, most_bytes: int) -> None:
        """Create a reader. `most_bytes`: maximum memory of the cache."""
        self._tokenizer = tokenizer
        self._marks = marks
        self._known = KnownPrompts(most_bytes)
        self._numbers: dict[int, int] = {}  # one int object per token id, shared by all prompts
        self.packer = TokenPacker()
        self.known_tokens = 0
        self.read_tokens = 0

    def read(
        self,
        text: str,
        add_special_tokens: bool,
        root: bytes,
        block_tokens: int,
        most_tokens: int | None = None,
        *,
        is_kept: bool = True,
    ) -> Reading:
        """Read a prompt in steps: one per AT_ONCE_CHARACTERS of new text, and two more for cached parts.

        `root`: parent of the first block hash. `is_kept`: store the result in the cache.
        Raises: TextTooLong for more than `most_tokens`.
        """
        *parts, rest = self._marks.parts(text)
        keys = part_keys(root, add_special_tokens, (text[part.begin : part.end] for part in parts))
        known = self._known.find(keys)
        if known:
            yield None
        token_ids, names, packed = list[int](), list[bytes](), list[bytes]()
        for kept in known:
            token_ids += kept.token_ids
            names += kept.block_hashes
            packed.append(kept.packed_tokens)
        known_tokens = len(token_ids)
        before, after = (self._marks.before, self._marks.after) if add_special_tokens and parts else ((), ())
        if not known:
            token_ids += before
        ends, counted, at_once = list[int](), len(token_ids) + len(after), 0
        for part in (*parts[len(known) :], rest):
            # If the text is a single part, the tokenizer itself adds the special tokens.
            piece, adds = text[part.start : part.end], add_special_tokens and not parts
            encoding = yield from self._encoded(piece, adds, counted, most_tokens)
            counted += len(encoding) - part.has_mark
            if most_tokens is None or counted <= most_tokens:  # ids of a too long text are not needed
                fresh = encoding.ids[part.has_mark :]
                begin = ends[-1] if ends else known_tokens
                token_ids += map(self._numbers.setdefault, fresh, fresh)
                packed.append(self.packer.pack(token_ids[begin:]))
                ends.append(len(token_ids))
            elif counted > max(2 * most_tokens, COUNTED_TOKENS):
                raise TextTooLong(counted)
            at_once += part.end - part.begin
            if at_once >= AT_ONCE_CHARACTERS:
                at_once = 0
                yield None
        if most_tokens is not None and counted > most_tokens:
            raise TextTooLong(counted, counted=True)
        token_ids += after
        packed.append(self.packer.pack(after))
        names = HashChain(root, block_tokens, names).first(len(token_ids) // block_tokens, token_ids)
        cut = _cut(token_ids, names, packed[len(known) :], [known_tokens, *ends[:-1]], block_tokens)
        if is_kept:
            self._known.keep(keys, cut)
            self.known_tokens += known_tokens
            self.read_tokens += len(token_ids) - known_tokens
        if known:
            yield None
        yield ReadPrompt(tuple(token_ids), tuple(names), b"".join(packed))

    def tokens(self, text: str, add_special_tokens: bool, most_tokens: int | None = None) -> Reading:
        """Tokenise a text without storing it in the cache; block hashes are empty. Raises: TextTooLong."""
        return self.read(text, add_special_tokens, b"", sys.maxsize, most_tokens, is_kept=False)

    def count(self, text: str, most_tokens: int, counted: int = 0) -> Generator[None, object]:
        """Count a text's tokens slice by slice, until there are more than `most_tokens`. Raises: TextTooLong.

        `counted`: tokens before this text. A text that fits even with one token per byte is not counted.
        """
        if counted + _size_bytes(text) <= most_tokens:
            return
        step = SLICE_BYTES if text.isascii() else SLICE_BYTES // 4
        for begin in range(0, len(text), step):
            counted += len(self._encode(text[begin : begin + step], False)) - CUT_TOKENS
            if counted > most_tokens:
                raise TextTooLong(counted)
            yield None

    def _encoded(
        self, text: str, add_special_tokens: bool, counted: int, most_tokens: int | None
    ) -> Generator[LongPart | None, Encoding | None, Encoding]:
        """Encode a text, or yield it as a LongPart if it is long. Raises: TextTooLong."""
        if len(text) <= LONG_BYTES // 4 or (size_bytes := _size_bytes(text)) <= LONG_BYTES:
            return self._encode(text, add_special_tokens)
        if most_tokens is not None:
            yield from self.count(text, most_tokens, counted)
        encoding = yield LongPart(text, add_special_tokens, size_bytes)
        if encoding is None:
            raise RuntimeError("the caller must send the encoding of a LongPart, but sent None")
        return encoding

    def _encode(self, text: str, add_special_tokens: bool) -> Encoding:
        return encode(self._tokenizer, text, add_special_tokens)


def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> Encoding:
    """Encode a text by `encode_batch_fast`. `Tokenizer.encode` would hold the GIL longer: 240 000 characters would
    block the event loop for 26 ms instead of 6 ms.
    """
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]


def _size_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _cut(
    token_ids: Sequence[int], names: Sequence[bytes], packed: Sequence[bytes], places: Sequence[int], block_tokens: int
) -> list[Kept]:
    """Cut tokens and block hashes into parts at the token positions `places`. `packed`: packed tokens of each part."""
    return [
        Kept(tuple(token_ids[begin:end]), tuple(names[begin // block_tokens : end // block_tokens]), part)
        for (begin, end), part in zip(pairwise(places), packed, strict=False)
    ]
