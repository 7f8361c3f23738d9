"""Texts of prompts to tokens and block names, of which what is known from an earlier prompt is not made again.

Equal to tokenising and hashing the whole text, always. Runs on the tokenizer's thread.
"""

from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import NamedTuple

from tokenizers import Encoding, Tokenizer

from baton.generation.block_hash import HashChain
from baton.generation.packed_tokens import TokenPacker
from baton.router.model.known_prompts import Kept, KnownPrompts, part_keys
from baton.router.model.marks import Marks

AT_ONCE_CHARACTERS = 1 << 14


class TextTooLong(Exception):
    """Known before anything was made of its tokens: there are at least so many."""

    def __init__(self, least_tokens: int, counted: bool = False) -> None:
        """`counted`: it has no more either."""
        super().__init__(f"{least_tokens} tokens" if counted else f"at least {least_tokens} tokens")
        self.least_tokens = least_tokens
        self.counted = counted


class ReadPrompt(NamedTuple):
    token_ids: tuple[int, ...]
    block_hashes: tuple[bytes, ...]  # one per complete block
    packed_tokens: bytes  # as in a message


class PromptReader:
    """One tokenizer, and what it has read. `known_tokens` and `read_tokens` count those of all prompts so far."""

    def __init__(self, tokenizer: Tokenizer, marks: Marks, most_bytes: int) -> None:
        """`most_bytes`: of memory, for what is kept."""
        self._tokenizer = tokenizer
        self._marks = marks
        self._known = KnownPrompts(most_bytes)
        self._numbers: dict[int, int] = {}  # each token's number once, however many prompts have it
        self.packer = TokenPacker()
        self.known_tokens = 0
        self.read_tokens = 0

    def read(
        self, text: str, add_special_tokens: bool, root: bytes, block_tokens: int, most_tokens: int | None = None
    ) -> Generator[ReadPrompt | None]:
        """The prompt, last; None after each AT_ONCE_CHARACTERS that were new, so that others may have their turn.

        What is known is long: to find it, to put it together and to hand it over are turns too.

        `root`: the parent of the first block's name. Raises: TextTooLong for more than `most_tokens`.
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
            # Around a text in one part, the tokenizer itself puts the special tokens.
            encoding = self._encode(text[part.start : part.end], add_special_tokens and not parts)
            counted += len(encoding) - part.has_mark
            if most_tokens is None or counted <= most_tokens:  # to make numbers of them keeps the GIL
                fresh = encoding.ids[part.has_mark :]
                begin = ends[-1] if ends else known_tokens
                token_ids += map(self._numbers.setdefault, fresh, fresh)
                packed.append(self.packer.pack(token_ids[begin:]))
                ends.append(len(token_ids))
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
        self._known.keep(keys, cut)
        self.known_tokens += known_tokens
        self.read_tokens += len(token_ids) - known_tokens
        if known:
            yield None
        yield ReadPrompt(tuple(token_ids), tuple(names), b"".join(packed))

    def _encode(self, text: str, add_special_tokens: bool) -> Encoding:
        """Not by `encode`, which keeps the GIL while it works."""
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]


def _cut(
    token_ids: Sequence[int], names: Sequence[bytes], packed: Sequence[bytes], places: Sequence[int], block_tokens: int
) -> list[Kept]:
    """Between each two places, counted in tokens. `packed` has an entry for each of these parts, and perhaps more."""
    return [
        Kept(tuple(token_ids[begin:end]), tuple(names[begin // block_tokens : end // block_tokens]), part)
        for (begin, end), part in zip(pairwise(places), packed, strict=False)
    ]
