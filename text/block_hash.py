"""Names of KV blocks: a chain of SHA-256 hashes of tokens, whose root covers everything else that changes KV."""

import hashlib
import sys
from array import array
from collections.abc import Sequence

HASH_BYTES = 32


def root_hash(fingerprint: bytes, dtype: str, adapter: str = "", cache_salt: str = "", key_salt: bytes = b"") -> bytes:
    """Return the root of a hash chain: the parent of a prompt's first block.

    Each hashed field is preceded by its length, so that no two combinations coincide. `dtype`: compute dtype.
    `key_salt`: salt of the API key, which the key's owner cannot choose; omitted without keys.
    """
    digest = hashlib.sha256(b"baton.kv.v1")
    parts = (fingerprint, dtype.encode(), adapter.encode(), cache_salt.encode())
    for part in (*parts, key_salt) if key_salt else parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def block_hashes(root: bytes, token_ids: Sequence[int], block_tokens: int) -> tuple[bytes, ...]:
    """Return SHA-256(parent, token ids as little-endian uint32) of every complete block, in order."""
    chain = HashChain(root, block_tokens)
    return tuple(chain.first(len(token_ids) // block_tokens, token_ids))


class HashChain:
    """Names of the complete blocks of a growing sequence."""

    def __init__(self, root: bytes, block_tokens: int, known: Sequence[bytes] = ()) -> None:
        """Start a chain. `known`: names of the first blocks, which are not computed again."""
        self._root = root
        self._block_tokens = block_tokens
        self._hashes = list(known)

    def first(self, blocks: int, token_ids: Sequence[int]) -> list[bytes]:
        """Return the names of the sequence's first `blocks` blocks, whose tokens `token_ids` must contain."""
        begin = len(self._hashes) * self._block_tokens
        raw = memoryview(_words(token_ids[begin : blocks * self._block_tokens]))
        parent = self._hashes[-1] if self._hashes else self._root
        block_bytes = 4 * self._block_tokens
        for start in range(0, len(raw), block_bytes):
            parent = hashlib.sha256(parent + raw[start : start + block_bytes]).digest()
            self._hashes.append(parent)
        return self._hashes[:blocks]

    def fork(self) -> "HashChain":
        return HashChain(self._root, self._block_tokens, self._hashes)


def _words(token_ids: Sequence[int]) -> bytes:
    words = array("I", token_ids)
    if words.itemsize != 4:
        raise RuntimeError("this platform has no 32-bit unsigned int")
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
