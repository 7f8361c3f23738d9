"""Beginnings of prompts that have been read: their tokens and the names of their blocks, by content. Pure.

A prompt is kept in parts. The key of a part is a SHA-256 over its text and the key of the part before; the first key
covers all that the names of blocks cover, salts included. So equal beginnings are kept once, nothing is found by a
request that could not find its blocks in a cache either, and a text is as good as compared in full.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

PART_BYTES = 512  # of memory, beside tokens and names
TOKEN_BYTES = 8  # a reference: the numbers themselves are shared
NAME_BYTES = 73  # with its reference


class Kept(NamedTuple):
    """Tokens and names of one part of a text."""

    token_ids: tuple[int, ...]
    block_hashes: tuple[bytes, ...]  # of the blocks whose last token is one of these
    packed_tokens: bytes  # as in a message

    @property
    def memory_bytes(self) -> int:
        tokens, names = TOKEN_BYTES * len(self.token_ids), NAME_BYTES * len(self.block_hashes)
        return PART_BYTES + tokens + names + len(self.packed_tokens)


def part_keys(root: bytes, add_special_tokens: bool, parts: Iterable[str]) -> list[bytes]:
    """Return the keys of a prompt's parts. `root`: the parent of its first block (`root_hash`), 32 bytes."""
    keys, key = list[bytes](), root + bytes((add_special_tokens,))
    for part in parts:
        key = hashlib.sha256(key + part.encode(errors="surrogatepass")).digest()
        keys.append(key)
    return keys


class KnownPrompts:
    """Cache of recently read prompts, within `most_bytes` of memory. The end of a prompt is evicted before its
    beginning.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()  # the next one to be given up first
        self.memory_bytes = 0

    def find(self, keys: Sequence[bytes]) -> list[Kept]:
        """The first parts of a prompt, as far as they are known."""
        found = list[Kept]()
        for key in keys:
            kept = self._kept.get(key)
            if kept is None:
                break
            found.append(kept)
        return found

    def keep(self, keys: Sequence[bytes], read: Sequence[Kept]) -> None:
        """Store a prompt. `keys`: of the complete prompt; `read`: its last parts; the others were found."""
        for key, kept in zip(keys[len(keys) - len(read) :], read, strict=True):
            if key not in self._kept:
                self._kept[key] = kept
                self.memory_bytes += kept.memory_bytes
        for key in reversed(keys):
            if key in self._kept:
                self._kept.move_to_end(key)
        while self.memory_bytes > self._most_bytes:
            _, given_up = self._kept.popitem(last=False)
            self.memory_bytes -= given_up.memory_bytes
