"""What the pool tells of its prefix cache, and that a block can only be found together with its whole prefix."""

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.block_table import BlockTable, acquire

A, B, C = b"a", b"ab", b"abc"


def cached(pool: BlockPool, hashes: list[bytes]) -> None:
    table = BlockTable(pool, pool.allocate(len(hashes)))
    table.publish(hashes)
    table.release()


def test_journal_begins_with_present_hashes_and_continues_with_changes() -> None:
    pool = BlockPool(3)
    cached(pool, [A, B])
    journal = pool.keep_journal()
    first = journal.take()
    assert first is not None and (set(first.stored), first.evicted) == ({A, B}, ())
    pool.allocate(2)
    second = journal.take()
    assert second is not None and (second.stored, second.evicted) == ((), (B,))
    assert journal.take() is None


def test_hash_stored_twice_is_reported_once() -> None:
    pool = BlockPool(4)
    journal = pool.keep_journal()
    cached(pool, [A])
    journal.take()
    table = BlockTable(pool, pool.allocate(1))
    table.publish([A])
    assert journal.take() is None


def test_parent_of_a_held_child_is_not_evicted() -> None:
    """Two sequences computed A; only one copy has the name, and the other sequence holds the child."""
    pool = BlockPool(4)
    first = BlockTable(pool, pool.allocate(1))
    second = BlockTable(pool, pool.allocate(2))
    first.publish([A])
    second.publish([A, B])
    first.release()
    cached(pool, [b"x"])
    pool.allocate(1)
    assert pool.lookup([A]) and not pool.lookup([b"x"])


def test_where_only_such_parents_are_left_their_children_lose_their_names_too() -> None:
    pool = BlockPool(3)
    journal = pool.keep_journal()
    first = BlockTable(pool, pool.allocate(1))
    second = BlockTable(pool, pool.allocate(2))
    first.publish([A])
    second.publish([A, B])
    watch = pool.watch([A, B])
    first.release()
    journal.take()
    pool.allocate(1)
    changes = journal.take()
    assert changes is not None and set(changes.evicted) == {A, B}
    assert watch.broken
    assert pool.lookup([A, B]) == []
    pool.check_conservation()
    second.publish([A, B])  # as it does with every block that becomes complete
    assert pool.touch([A, B]) == second.blocks
    second.release()
    pool.check_conservation()


def test_block_without_a_cached_parent_is_not_published() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.publish(block, C, parent_hash=B)
    pool.release(block)
    assert pool.counts.free == 2


def test_blocks_awaited_by_a_prompt_are_evicted_last() -> None:
    pool = BlockPool(2)
    cached(pool, [A])
    cached(pool, [b"x"])
    assert len(pool.touch([A])) == 1
    acquire(pool, [], 1)
    assert pool.touch([A]) and not pool.touch([b"x"])
