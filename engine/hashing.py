"""Names of KV blocks where there is no router to compute them: chained SHA-256 over tokens, as router/block_hashing.py.

The two are twins, since a router never imports an engine; a test holds them equal.
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence


def cache_root(fingerprint: bytes, kv_dtype: str, adapter: str = "", cache_salt: str = "") -> bytes:
    """The parent of a sequence's first block, 32 bytes: all that makes KV differ for equal tokens, length-prefixed."""
    digest = hashlib.sha256(b"baton.kv.v1")
    for part in (fingerprint, kv_dtype.encode(), adapter.encode(), cache_salt.encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of one complete block after `parent`: SHA-256(parent, token ids as little-endian uint32)."""
    return hashlib.sha256(parent + _words(token_ids)).digest()


def _words(token_ids: Sequence[int]) -> bytes:
    words = array("I", token_ids)
    if words.itemsize != 4:
        raise RuntimeError("this platform has no 32-bit unsigned int")
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


class HashChain:
    """The names of one growing sequence's complete blocks, in order."""

    def __init__(self, root: bytes, block_tokens: int, known: Sequence[bytes] = ()) -> None:
        """`known` are the names of the first blocks, where someone has computed them already."""
        self._root = root
        self._block_tokens = block_tokens
        self._hashes = list(known)

    def first(self, blocks: int, token_ids: Sequence[int]) -> list[bytes]:
        """The names of the first `blocks` blocks of a sequence that begins with `token_ids`, all of them complete."""
        begin = len(self._hashes) * self._block_tokens
        words = _words(token_ids[begin : blocks * self._block_tokens])
        stride = 4 * self._block_tokens
        for start in range(0, len(words), stride):
            parent = self._hashes[-1] if self._hashes else self._root
            self._hashes.append(hashlib.sha256(parent + words[start : start + stride]).digest())
        return self._hashes[:blocks]

    def fork(self) -> "HashChain":
        return HashChain(self._root, self._block_tokens, self._hashes)
