"""The engine's names of blocks are the router's."""

import random

from engine.hashing import HashChain, cache_root
from router import block_hashing


def test_both_name_blocks_alike() -> None:
    draw = random.Random(0)
    for tokens in (0, 1, 31, 32, 33, 200):
        token_ids = [draw.randrange(2**32) for _ in range(tokens)]
        fingerprint, salt = draw.randbytes(32), draw.choice(["", "tenant"])
        root = cache_root(fingerprint, "bfloat16", "adapter", salt)
        assert root == block_hashing.root_hash(fingerprint, "bfloat16", "adapter", salt)
        expected = block_hashing.block_hashes(root, token_ids, 32)
        assert tuple(HashChain(root, 32).first(tokens // 32, token_ids)) == expected


def test_a_chain_goes_on_from_names_that_are_known() -> None:
    token_ids = list(range(10))
    whole = HashChain(b"root", 2).first(5, token_ids)
    assert HashChain(b"not used", 2, whole[:3]).first(5, token_ids) == whole


def test_twins_of_a_chain_go_their_own_ways() -> None:
    chain = HashChain(b"root", 2)
    chain.first(1, [1, 2])
    twin = chain.fork()
    assert chain.first(2, [1, 2, 3, 4]) != twin.first(2, [1, 2, 5, 6])
