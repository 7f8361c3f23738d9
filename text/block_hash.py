"""Names of KV blocks: a chain of SHA-256 over the tokens, rooted in all that makes KV differ for equal tokens."""

import hashlib
import sys
from array import array
from collections.abc import Sequence

HASH_BYTES = 32


def root_hash(fingerprint: bytes, dtype: str, adapter: str = "", cache_salt: str = "", key_salt: bytes = b"") -> bytes:
    """The parent of a prompt's first block. Every part is preceded by its length, so that no two mixes coincide.

    `dtype`: the one that the model computes in. `key_salt`: that of the API key, whose holder cannot choose it;
    without keys there is no such part.
    """
    digest = hashlib.sha256(b"baton.kv.v1")
    parts = (fingerprint, dtype.encode(), adapter.encode(), cache_salt.encode())
    for part in (*parts, key_salt) if key_salt else parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def block_hashes(root: bytes, token_ids: Sequence[int], block_tokens: int) -> tuple[bytes, ...]:
    """SHA-256(parent, token ids as little-endian uint32) of every complete block of `token_ids`, in order."""
    chain = HashChain(root, block_tokens)
    return tuple(chain.first(len(token_ids) // block_tokens, token_ids))


class HashChain:
    """The names of one growing sequence's complete blocks, in order."""

    def __init__(self, root: bytes, block_tokens: int, known: Sequence[bytes] = ()) -> None:
        """`known` are the names of the first blocks, where they have been computed already."""
        self._root = root
        self._block_tokens = block_tokens
        self._hashes = list(known)

    def first(self, blocks: int, token_ids: Sequence[int]) -> list[bytes]:
        """The names of the first `blocks` blocks of a sequence that begins with `token_ids`, all of them complete."""
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
