"""Block hashes: a chain over tokens, rooted in all that makes KV differ."""

import hashlib
import struct

import pytest

from baton.text.block_hash import HashChain, block_hashes, root_hash

ROOT = root_hash(b"fingerprint", "float32", "", "")


def test_each_hash_is_sha256_of_its_parent_and_little_endian_tokens() -> None:
    first = hashlib.sha256(ROOT + struct.pack("<2I", 1, 70_000)).digest()
    second = hashlib.sha256(first + struct.pack("<2I", 3, 4)).digest()
    assert block_hashes(ROOT, [1, 70_000, 3, 4, 5], block_tokens=2) == (first, second)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (31, 0), (32, 1), (33, 1), (64, 2)])
def test_only_complete_blocks_have_a_hash(tokens: int, blocks: int) -> None:
    assert len(block_hashes(ROOT, range(tokens), block_tokens=32)) == blocks


def test_hash_covers_everything_before_it() -> None:
    one = block_hashes(ROOT, [1, 2, 3, 4], block_tokens=2)
    other = block_hashes(ROOT, [9, 2, 3, 4], block_tokens=2)
    assert one[1] != other[1]


@pytest.mark.parametrize(
    "parts",
    [
        (b"other", "float32", "", ""),
        (b"fingerprint", "bfloat16", "", ""),
        (b"fingerprint", "float32", "adapter", ""),
        (b"fingerprint", "float32", "", "salt"),
        (b"fingerprintf", "loat32", "", ""),
        (b"fingerprint", "float32a", "", ""),
    ],
)
def test_root_covers_every_part_and_where_it_ends(parts: tuple[bytes, str, str, str]) -> None:
    assert root_hash(*parts) != ROOT


def test_chain_continues_from_known_names() -> None:
    token_ids = list(range(10))
    whole = HashChain(b"root", 2).first(5, token_ids)
    assert HashChain(b"not used", 2, whole[:3]).first(5, token_ids) == whole


def test_twins_of_a_chain_go_their_own_ways() -> None:
    chain = HashChain(b"root", 2)
    chain.first(1, [1, 2])
    twin = chain.fork()
    assert chain.first(2, [1, 2, 3, 4]) != twin.first(2, [1, 2, 5, 6])
