"""Cache of the tokens and block hashes of prompt prefixes that were tokenised before. Pure state.

A prompt is kept in parts. The key of a part is the SHA-256 of the previous part's key and its text; the first key also
covers everything that block hashes cover, including salts. So equal prefixes are kept once, and a request finds only
prefixes whose blocks it could also find in a prefix cache.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

PART_BYTES = 512  # bytes of a part, in addition to its tokens and hashes
TOKEN_BYTES = 8  # bytes of a reference to a token id; the int objects are shared
NAME_BYTES = 73  # bytes of a block hash and the reference to it


class Kept(NamedTuple):
    """Cached tokens and block hashes of one part of a prompt."""

    token_ids: tuple[int, ...]
    block_hashes: tuple[bytes, ...]  # hashes of the blocks that end in this part
    packed_tokens: bytes  # token_ids in protobuf's packed encoding

    @property
    def memory_bytes(self) -> int:
        tokens, names = TOKEN_BYTES * len(self.token_ids), NAME_BYTES * len(self.block_hashes)
        return PART_BYTES + tokens + names + len(self.packed_tokens)


def part_keys(root: bytes, add_special_tokens: bool, parts: Iterable[str]) -> list[bytes]:
    """Return the cache keys of a prompt's parts. `root`: parent of the first block hash (`root_hash`), 32 bytes."""
    keys, key = list[bytes](), root + bytes((add_special_tokens,))
    for part in parts:
        key = hashlib.sha256(key + part.encode(errors="surrogatepass")).digest()
        keys.append(key)
    return keys


class KnownPrompts:
    """LRU cache of prompt parts in at most `most_bytes`. The last parts of a prompt are evicted before the first."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()  # next part to evict first
        self.memory_bytes = 0

    def find(self, keys: Sequence[bytes]) -> list[Kept]:
        """Return the first parts of a prompt, up to the first that is not cached."""
        found = list[Kept]()
        for key in keys:
            kept = self._kept.get(key)
            if kept is None:
                break
            found.append(kept)
        return found

    def keep(self, keys: Sequence[bytes], read: Sequence[Kept]) -> None:
        """Store a prompt. `keys`: keys of all its parts. `read`: the prompt's last parts, which were not cached."""
        for key, kept in zip(keys[len(keys) - len(read) :], read, strict=True):
            if key not in self._kept:
                self._kept[key] = kept
                self.memory_bytes += kept.memory_bytes
        for key in reversed(keys):
            if key in self._kept:
                self._kept.move_to_end(key)
        while self.memory_bytes > self._most_bytes:
            _, evicted = self._kept.popitem(last=False)
            self.memory_bytes -= evicted.memory_bytes
