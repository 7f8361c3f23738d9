"""References and the free list: who holds a block, and what happens when there are none left."""

import pytest

from baton.engine.kv_cache.block_pool import BlockCounts, BlockError, BlockPool, OutOfBlocks
from baton.engine.kv_cache.block_table import BlockTable, acquire
from baton.engine.request import BlockCopy


@pytest.fixture
def pool():
    pool = BlockPool(4)
    yield pool
    pool.check_conservation()


def test_allocation_gives_distinct_neighbouring_blocks(pool):
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.counts == BlockCounts(total=4, free=1, cached=0, held=3)


def test_allocation_is_all_or_nothing(pool):
    pool.allocate(3)
    with pytest.raises(OutOfBlocks) as refusal:
        pool.allocate(2)
    assert (refusal.value.wanted, refusal.value.available) == (2, 1)
    assert pool.counts.free == 1


def test_free_block_cannot_be_released_shared_or_published(pool):
    [block] = pool.allocate(1)
    pool.release(block)
    with pytest.raises(BlockError):
        pool.release(block)
    with pytest.raises(BlockError):
        pool.share(block)
    with pytest.raises(BlockError):
        pool.publish(block, b"a", None)


def test_held_only_by_counts_blocks_without_other_readers(pool):
    blocks = pool.allocate(3)
    pool.share(blocks[0])
    assert pool.held_only_by([blocks]) == 2
    assert pool.held_only_by([blocks, blocks[:1]]) == 3


def test_table_is_released_exactly_once(pool):
    table = BlockTable(pool, pool.allocate(2))
    table.release()
    with pytest.raises(BlockError):
        table.release()
    with pytest.raises(BlockError):
        _ = table.blocks
    assert pool.counts.free == 4


def test_released_blocks_are_neighbours_again(pool):
    BlockTable(pool, pool.allocate(3)).release()
    assert pool.allocate(3) == [0, 1, 2]


def test_released_table_cannot_grow(pool):
    table = BlockTable(pool, [])
    table.release()
    with pytest.raises(BlockError):
        table.append(1)
    assert pool.counts.free == 4


def test_table_numbers_of_a_running_step_do_not_change() -> None:
    pool = BlockPool(8)
    table = BlockTable(pool, pool.allocate(2))
    taken = table.numbers
    table.append(3)
    assert tuple(table.numbers) == table.blocks and len(table.blocks) == 5
    assert tuple(taken) == table.blocks[:2]
    pool.share(table.blocks[1])
    before = table.numbers
    assert table.make_writable(1)
    assert tuple(table.numbers) == table.blocks != tuple(before)


def test_own_column_is_unknown_once_its_block_is_shared(pool):
    table = BlockTable(pool, pool.allocate(1))
    assert table.own_column is None
    table.grow(1, 4)
    assert table.own_column == 0
    table.fork(1)
    assert table.own_column is None
    assert table.grow(1, 4) == [BlockCopy(source=0, destination=1)]


def test_acquiring_takes_nothing_where_room_is_short(pool):
    [block] = pool.allocate(1)
    pool.publish(block, b"a", None)
    pool.release(block)
    with pytest.raises(OutOfBlocks):
        acquire(pool, [b"a"], columns=5)
    assert pool.counts == BlockCounts(total=4, free=3, cached=1, held=0)


def test_distrusted_block_and_its_descendants_are_not_found(pool):
    blocks = pool.allocate(3)
    for block, (block_hash, parent) in zip(blocks, [(b"a", None), (b"ab", b"a"), (b"abc", b"ab")], strict=True):
        pool.publish(block, block_hash, parent)
    pool.release(blocks[2])
    pool.distrust([blocks[1]])
    assert pool.counts == BlockCounts(total=4, free=2, cached=0, held=2), "the cached one is free, held ones stay"
    assert pool.touch([b"a", b"ab", b"abc"]) == (blocks[0],)
    pool.distrust([blocks[1]])
    pool.release(blocks[1])
    pool.release(blocks[0])
    pool.check_conservation()
    assert pool.counts == BlockCounts(total=4, free=3, cached=1, held=0)


def test_conservation_notices_a_lost_block(pool):
    broken = BlockPool(2)
    broken._free.pop()
    with pytest.raises(AssertionError, match="in no state"):
        broken.check_conservation()


def test_completed_block_is_named_from_its_parent_alone() -> None:
    pool, published = BlockPool(100), list[bytes]()
    table, hashes = BlockTable(pool, pool.allocate(100)), [bytes((number,)) * 32 for number in range(100)]
    table.publish(hashes[:99])
    publish = pool.publish

    def noted(block: int, block_hash: bytes, parent_hash: bytes | None) -> None:
        published.append(block_hash)
        publish(block, block_hash, parent_hash)

    pool.publish = noted  # type: ignore[method-assign]
    table.publish(hashes, named_columns=99)
    assert published == hashes[99:]
    pool.distrust(table.blocks[50:51])
    published.clear()
    table.publish(hashes, named_columns=100)
    assert published == hashes[50:], "names that were lost are given again"
    assert len(pool.lookup(hashes)) == 100
