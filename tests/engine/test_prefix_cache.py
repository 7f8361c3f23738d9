"""Complete blocks under their hash: found again, shared, and evicted oldest and outermost first."""

from collections.abc import Sequence

import pytest

from baton.engine.kv_cache.block_pool import BlockCounts, BlockError, BlockPool
from baton.engine.kv_cache.block_table import BlockTable, acquire


@pytest.fixture
def pool():
    pool = BlockPool(6)
    yield pool
    pool.check_conservation()


def held_chain(pool: BlockPool, hashes: Sequence[bytes]) -> BlockTable:
    table = acquire(pool, hashes, len(hashes)).table
    table.publish(hashes)
    return table


def cached_chain(pool: BlockPool, hashes: Sequence[bytes]) -> None:
    held_chain(pool, hashes).release()


def known(pool: BlockPool, hashes: Sequence[bytes]) -> int:
    """Length of the cached prefix, looked up without keeping it."""
    blocks = pool.lookup(hashes)
    BlockTable(pool, blocks).release()
    return len(blocks)


def test_lookup_finds_the_longest_prefix_and_holds_it(pool):
    cached_chain(pool, [b"a", b"b"])
    assert pool.lookup([b"a", b"b", b"c"]) == [0, 1]
    assert pool.counts == BlockCounts(total=6, free=4, cached=0, held=2)


def test_block_has_one_hash_only(pool):
    [block] = pool.allocate(1)
    pool.publish(block, b"a", None)
    with pytest.raises(BlockError):
        pool.publish(block, b"b", None)


def test_free_blocks_go_before_cached_ones(pool):
    cached_chain(pool, [b"a", b"b"])
    pool.allocate(4)
    assert known(pool, [b"a", b"b"]) == 2


def test_least_recently_used_block_is_evicted_first(pool):
    for name in (b"a", b"b", b"c"):
        cached_chain(pool, [name])
    assert known(pool, [b"a"]) == 1, "a is now the last one used"
    pool.allocate(4)
    assert [known(pool, [name]) for name in (b"a", b"b", b"c")] == [1, 0, 1]


def test_leaves_are_evicted_before_their_parents(pool):
    cached_chain(pool, [b"a", b"b", b"c"])
    pool.allocate(4)
    assert known(pool, [b"a", b"b", b"c"]) == 2


def test_parent_older_than_its_cached_child_outlives_it(pool):
    first = BlockTable(pool, pool.allocate(1))
    second = BlockTable(pool, pool.allocate(2))  # computed the same first block at the same time
    first.publish([b"a"])
    second.publish([b"a", b"b"])
    first.release()
    second.release()
    assert pool.counts == BlockCounts(total=6, free=4, cached=2, held=0)
    pool.allocate(5)
    assert known(pool, [b"a", b"b"]) == 1


def test_eviction_makes_the_whole_pool_available(pool):
    cached_chain(pool, [b"a", b"b", b"c"])
    cached_chain(pool, [b"x", b"y", b"z"])
    assert sorted(pool.allocate(6)) == [0, 1, 2, 3, 4, 5]
    assert pool.counts == BlockCounts(total=6, free=0, cached=0, held=6)
