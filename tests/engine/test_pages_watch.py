"""Watched blocks: read from outside without being held. Nothing is kept back for a reader, and it is never deceived."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.engine.kv_cache.block_pool import BlockPool, Watch


def cached_chain(pool: BlockPool, name: str, length: int) -> list[bytes]:
    """So many complete blocks that nobody holds."""
    hashes = [f"{name}{index}".encode() for index in range(length)]
    blocks = pool.allocate(length)
    for index, block in enumerate(blocks):
        pool.publish(block, hashes[index], hashes[index - 1] if index else None)
    for block in reversed(blocks):
        pool.release(block)
    return hashes


def test_watch_shows_the_longest_known_prefix_and_holds_nothing() -> None:
    pool = BlockPool(6)
    hashes = cached_chain(pool, "a", 3)
    held = pool.lookup(hashes[:1])
    before = pool.counts
    assert pool.watch([*hashes, b"unknown"]).blocks == (0, 1, 2)
    assert pool.watch([b"unknown", *hashes]).blocks == ()
    assert pool.counts == before and pool.references(held[0]) == 1


def test_room_is_made_of_others_first_and_then_of_watched_blocks_too() -> None:
    pool = BlockPool(4)
    watch = pool.watch(cached_chain(pool, "a", 2))
    cached_chain(pool, "b", 2)
    pool.allocate(2)
    assert not watch.broken
    pool.allocate(1)
    assert watch.broken
    pool.check_conservation()


def test_last_of_a_watched_chain_goes_first() -> None:
    pool = BlockPool(3)
    hashes = cached_chain(pool, "a", 3)
    pool.watch(hashes)
    pool.allocate(1)
    assert len(pool.lookup(hashes)) == 2


def test_watch_updates_its_blocks() -> None:
    pool = BlockPool(4)
    older, newer = cached_chain(pool, "a", 2), cached_chain(pool, "b", 2)
    pool.unwatch(pool.watch(older))
    pool.allocate(2)
    assert len(pool.lookup(older)) == 2 and not pool.lookup(newer)


def test_watches_of_single_blocks_break_one_by_one_and_renew_nothing() -> None:
    pool = BlockPool(4)
    older, newer = cached_chain(pool, "a", 2), cached_chain(pool, "b", 2)
    watches = pool.watch_each([*older, b"unknown"])
    assert [watch.blocks for watch in watches] == [(0,), (1,), ()]
    pool.unwatch(watches[1])
    pool.allocate(1)
    assert pool.touch(older) == (0,) and len(pool.touch(newer)) == 2, "the older chain lost its end first"
    assert [watch.broken for watch in watches] == [False, False, False]
    pool.allocate(3)
    assert watches[0].broken
    pool.check_conservation()


def test_closed_watch_receives_nothing() -> None:
    pool = BlockPool(2)
    watch = pool.watch(cached_chain(pool, "a", 2))
    pool.unwatch(watch)
    pool.unwatch(watch)
    pool.allocate(2)
    assert not watch.broken
    pool.check_conservation()


TOTAL = 5
NAMES = st.sampled_from([b"a", b"b", b"c"])


class Readers(RuleBasedStateMachine):
    """Every block's content is the hash that it was written under; a reader notes what it is told to expect."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.content: dict[int, bytes] = {}
        self.held: list[list[int]] = []
        self.watches: list[tuple[Watch, list[bytes]]] = []

    @rule(name=NAMES, length=st.integers(1, TOTAL))
    def compute(self, name: bytes, length: int) -> None:
        counts = self.pool.counts
        hashes = [name * (index + 1) for index in range(length)]
        blocks = self.pool.lookup(hashes)
        fresh = length - len(blocks)
        if fresh <= self.pool.counts.free + self.pool.counts.cached:
            new = self.pool.allocate(fresh)  # never refused for the sake of a watch
            for index, block in enumerate(new, start=len(blocks)):
                self.content[block] = hashes[index]
                self.pool.publish(block, hashes[index], hashes[index - 1] if index else None)
            blocks += new
        else:
            assert counts.held > 0
        self.held.append(blocks)

    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        if self.held:
            for block in reversed(self.held.pop(which % len(self.held))):
                self.pool.release(block)

    @rule(name=NAMES)
    def watch(self, name: bytes) -> None:
        watch = self.pool.watch([name * (index + 1) for index in range(TOTAL)])
        self.watches.append((watch, [name * (index + 1) for index in range(len(watch.blocks))]))

    @rule(name=NAMES)
    def watch_each(self, name: bytes) -> None:
        hashes = [name * (index + 1) for index in range(TOTAL)]
        for watch, expected in zip(self.pool.watch_each(hashes), hashes, strict=True):
            self.watches.append((watch, [expected] if watch.blocks else []))

    @rule(which=st.integers(0, 99))
    def unwatch(self, which: int) -> None:
        if self.watches:
            self.pool.unwatch(self.watches.pop(which % len(self.watches))[0])

    @invariant()
    def what_is_not_broken_is_what_it_was(self) -> None:
        self.pool.check_conservation()
        for watch, expected in self.watches:
            same = [self.content[block] for block in watch.blocks] == expected
            assert same or watch.broken


TestReaders = Readers.TestCase
TestReaders.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
