"""Names for KV blocks: a chain of SHA-256 over the tokens, rooted in all that makes KV differ for equal tokens."""

import hashlib
import sys
from array import array
from collections.abc import Sequence

HASH_BYTES = 32


def root_hash(fingerprint: bytes, kv_dtype: str, adapter: str, cache_salt: str, key_salt: bytes = b"") -> bytes:
    """The parent of a prompt's first block. Every part is preceded by its length, so that no two mixes coincide.

    `key_salt` is that of the API key, whose holder cannot choose it; without keys there is no such part.
    """
    digest = hashlib.sha256(b"baton.kv.v1")
    parts = (fingerprint, kv_dtype.encode(), adapter.encode(), cache_salt.encode())
    for part in (*parts, key_salt) if key_salt else parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def block_hashes(root: bytes, token_ids: Sequence[int], block_tokens: int) -> tuple[bytes, ...]:
    """SHA-256(parent, token ids as little-endian uint32) of every complete block of `token_ids`, in order."""
    words = array("I", token_ids)
    if words.itemsize != 4:
        raise RuntimeError("this platform has no 32-bit unsigned int")
    if sys.byteorder == "big":
        words.byteswap()
    raw = memoryview(words.tobytes())
    block_bytes = 4 * block_tokens
    hashes: list[bytes] = []
    parent = root
    for begin in range(0, len(raw) - block_bytes + 1, block_bytes):
        parent = hashlib.sha256(parent + raw[begin : begin + block_bytes]).digest()
        hashes.append(parent)
    return tuple(hashes)
