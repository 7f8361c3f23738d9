"""Which cached block goes first, with sessions and without."""

from collections import OrderedDict
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from baton.engine.kv_cache.block_pool import BlockPool, OutOfBlocks, Watch
from baton.engine.kv_cache.block_table import BlockTable, acquire
from baton.engine.kv_cache.eviction import HALF_LIFE_BLOCKS, MIN_BLOCKS, RETRY_EVERY, Prefetches
from baton.engine.kv_cache.sessions import DueSession, RetentionState, SessionTurn


def chain(prompt: str) -> list[bytes]:
    return [prompt[: end + 1].encode() for end in range(len(prompt))]


def run(pool: BlockPool, prompt: str, turn: SessionTurn | None = None) -> None:
    """One request: its blocks are computed, published and released."""
    sessions = pool.order.sessions
    session = None if turn is None else sessions.begin(turn)
    table = acquire(pool, chain(prompt), len(prompt)).table
    table.publish(chain(prompt))
    if session is not None and turn is not None:
        sessions.end(session, turn, len(prompt))
    table.release(None if session is None else session.keep)
    pool.check_conservation()


def turn(
    name: str, at_s: float = 0.0, owner: str = "ann", keep_for_s: float | None = None, done: bool = False
) -> SessionTurn:
    return SessionTurn(name.encode(), owner.encode(), at_s, keep_for_s, done)


def evicted(pool: BlockPool, count: int) -> list[str]:
    """The names of the blocks that go next."""
    journal = pool.keep_journal()
    journal.take()
    gone: list[str] = []
    held = [pool.allocate(1) for _ in range(pool.counts.free)]
    for _ in range(count):
        held.append(pool.allocate(1))
        changes = journal.take()
        assert changes is not None
        gone += [name.decode() for name in changes.evicted]
    return gone


def test_finished_blocks_are_evicted_before_others_and_session_blocks_last() -> None:
    pool = BlockPool(12)
    run(pool, "ab", turn("kept"))
    run(pool, "cd")
    run(pool, "ef", turn("done", done=True))
    assert evicted(pool, 6) == ["ef", "e", "cd", "c", "ab", "a"]
    counts = pool.order.evictions
    assert (counts.done, counts.others, counts.protected) == (2, 2, 2)


def test_session_returning_later_is_evicted_first() -> None:
    pool = BlockPool(12)
    for at_s in range(0, 250, 50):
        run(pool, "cd", turn("late", at_s, keep_for_s=1e4))
    for at_s in range(245, 250):
        run(pool, "ab", turn("soon", at_s, keep_for_s=1e4))
    run(pool, "cd", turn("late", 250.0, keep_for_s=1e4))
    assert evicted(pool, 4) == ["cd", "c", "ab", "a"]


def test_blocks_of_a_lapsed_session_go_by_their_last_use() -> None:
    pool = BlockPool(12)
    run(pool, "ab", turn("short", keep_for_s=1.0))
    run(pool, "cd")
    run(pool, "ef", turn("long", keep_for_s=100.0))
    run(pool, "gh", turn("short too", keep_for_s=1.0))
    pool.order.sessions.advance(10.0)
    assert evicted(pool, 8) == ["ab", "a", "cd", "c", "gh", "g", "ef", "e"]


def test_beginning_that_a_session_needs_stays_though_another_request_used_it() -> None:
    pool = BlockPool(12)
    run(pool, "abc", turn("kept"))
    run(pool, "ab")  # of no session
    run(pool, "xy")
    assert evicted(pool, 5) == ["xy", "x", "abc", "ab", "a"]


def test_prefix_outlives_a_finished_session_if_another_continues_it() -> None:
    pool = BlockPool(12)
    run(pool, "abc", turn("kept"))
    run(pool, "abd", turn("done", done=True))
    run(pool, "xy")
    assert evicted(pool, 6) == ["abd", "xy", "x", "abc", "ab", "a"]


def test_one_owner_keeps_half_of_the_pool_and_displaces_nobody() -> None:
    pool = BlockPool(8)
    run(pool, "abcd", turn("first"))
    run(pool, "efg", turn("second"))
    assert pool.order.sessions.protected_blocks <= 4
    run(pool, "xy")
    assert evicted(pool, 3) == ["ef", "e", "xy"]  # by their last use, and the first session stays


def test_watched_block_is_evicted_last_for_any_owner() -> None:
    pool = BlockPool(8)
    run(pool, "ab")
    run(pool, "cd", turn("kept"))
    watch = pool.watch(chain("ab"))
    assert evicted(pool, 2) == ["cd", "c"]
    assert not watch.broken


def load(pool: BlockPool, prompt: str) -> None:
    """From files, for a prompt that is about to be queued."""
    table = acquire(pool, chain(prompt), len(prompt)).table
    blocks = list(table.blocks)
    table.publish(chain(prompt))
    table.release()
    pool.order.loaded(blocks)


def test_blocks_loaded_for_a_prompt_are_evicted_after_session_blocks() -> None:
    pool = BlockPool(12)
    run(pool, "ab", turn("kept"))
    load(pool, "cd")
    run(pool, "ef")
    assert evicted(pool, 6) == ["ef", "e", "ab", "a", "cd", "c"]


def test_loaded_blocks_that_were_used_go_as_others() -> None:
    pool = BlockPool(12)
    run(pool, "ab", turn("kept"))
    load(pool, "cd")
    run(pool, "cd")
    assert evicted(pool, 4) == ["cd", "c", "ab", "a"]


def test_only_the_newest_load_is_waited_for() -> None:
    pool = BlockPool(12)
    run(pool, "ab", turn("kept"))
    load(pool, "cd")
    load(pool, "ef")
    assert pool.order.awaited_blocks == 4
    assert evicted(pool, 6) == ["cd", "c", "ab", "a", "ef", "e"]
    assert pool.order.awaited_blocks == 0


DUE = [DueSession(bytes([number]), ()) for number in range(2 * RETRY_EVERY)]


def loaded_ahead(prefetches: Prefetches, used: int, lost: int) -> None:
    """So many blocks were, and this came of them."""
    prefetches.waiting.update(range(used + lost))
    for block in range(used + lost):
        (prefetches.on_used if block < used else prefetches.on_evicted)(block)


def test_sessions_are_loaded_ahead_until_it_is_known_to_be_for_nothing() -> None:
    prefetches = Prefetches()
    loaded_ahead(prefetches, used=0, lost=MIN_BLOCKS - 1)
    assert prefetches.worth_loading(DUE) == DUE
    loaded_ahead(prefetches, used=0, lost=1)
    assert prefetches.worth_loading(DUE) == [DUE[RETRY_EVERY - 1], DUE[-1]]


def test_prefetch_that_does_not_pay_is_tried_for_one_session_of_several() -> None:
    prefetches = Prefetches()
    loaded_ahead(prefetches, used=0, lost=MIN_BLOCKS)
    tried = [prefetches.worth_loading([session]) for session in DUE]
    assert [len(each) for each in tried] == [
        int(number % RETRY_EVERY == RETRY_EVERY - 1) for number in range(2 * RETRY_EVERY)
    ]


def test_used_prefetches_restore_loading_ahead() -> None:
    prefetches = Prefetches()
    loaded_ahead(prefetches, used=0, lost=50 * HALF_LIFE_BLOCKS)
    loaded_ahead(prefetches, used=HALF_LIFE_BLOCKS, lost=0)
    assert prefetches.worth_loading(DUE) == DUE
    assert prefetches.used == HALF_LIFE_BLOCKS


def test_blocks_that_no_prefetch_brought_are_not_counted() -> None:
    prefetches = Prefetches()
    for block in range(2 * MIN_BLOCKS):
        prefetches.on_evicted(block)
    assert prefetches.worth_loading(DUE) == DUE


def test_finished_kept_session_is_evicted_first() -> None:
    """Its last turn came to nothing, so that no block of it is used or released again."""
    pool = BlockPool(12)
    run(pool, "xy")
    run(pool, "ab", turn("kept"))
    last = turn("kept", 1.0, done=True)
    pool.order.sessions.end(pool.order.sessions.begin(last), last, None)
    assert evicted(pool, 4) == ["ab", "a", "xy", "x"]
    assert pool.order.evictions.done == 2


def test_touched_prefix_keeps_its_first_block_longest() -> None:
    """Where every cached block is continued by a held one, the least recently used goes, with all behind it."""
    pool = BlockPool(6)
    tables = [acquire(pool, (), 2).table for _ in range(2)]
    tables[1].append(1)
    for table in tables:
        table.publish(chain("abc"))
    tables[0].release()
    pool.touch(chain("ab"))
    pool.allocate(pool.counts.free)
    pool.allocate(1)
    assert pool.known_columns(chain("abc")) == 1


def test_watched_or_loaded_leaves_go_last_and_the_one_used_longest_ago_first() -> None:
    pool = BlockPool(6)
    for prompt in "abcd":
        run(pool, prompt)
    load(pool, "e")
    watches = [pool.watch(chain(prompt)) for prompt in "ba"]
    assert evicted(pool, 5) == ["c", "d", "e", "b", "a"]
    assert [watch.broken for watch in watches] == [True, True]
    assert pool.order.evictions.others == 5, "each in its turn, none for want of a leaf"


def test_unwatched_block_goes_in_its_turn_again() -> None:
    pool = BlockPool(6)
    for prompt in "abc":
        run(pool, prompt)
    pool.unwatch(pool.watch_each([b"a"])[0])
    assert evicted(pool, 3) == ["a", "b", "c"], "to be watched by itself is no use"


def test_shared_blocks_stay_with_their_last_session() -> None:
    pool = BlockPool(12)
    run(pool, "ab", turn("first", keep_for_s=1.0))
    run(pool, "ab", turn("second", keep_for_s=100.0))
    run(pool, "xy")
    pool.order.sessions.advance(10.0)
    assert pool.order.sessions.protected_blocks == 2
    assert evicted(pool, 4) == ["xy", "x", "ab", "a"]


def test_prefetched_blocks_count_once_and_only_while_cached() -> None:
    pool = BlockPool(4)
    run(pool, "ab")
    cached = list(pool.order)
    pool.order.prefetched([*cached, 99])
    pool.order.prefetched(cached)
    assert pool.order.counts.prefetched_blocks == 2
    run(pool, "ab")
    assert pool.order.counts.prefetched_used_blocks == 2
    assert evicted(pool, 2) == ["ab", "a"]
    assert pool.order.counts.prefetched_used_blocks == 2


def test_half_of_the_blocks_used_is_enough_to_load_all_ahead() -> None:
    for used, expected in ((MIN_BLOCKS // 2, 2 * RETRY_EVERY), (MIN_BLOCKS // 2 - 1, 2)):
        prefetches = Prefetches()
        loaded_ahead(prefetches, used=used, lost=MIN_BLOCKS - used)
        assert len(prefetches.worth_loading(DUE)) == expected


def test_outcomes_of_earlier_prefetches_decay_by_half() -> None:
    prefetches = Prefetches()
    loaded_ahead(prefetches, used=0, lost=HALF_LIFE_BLOCKS - 1)
    assert prefetches._lost_lately == HALF_LIFE_BLOCKS - 1
    loaded_ahead(prefetches, used=1, lost=0)
    assert (prefetches._used_lately, prefetches._lost_lately) == (0.5, (HALF_LIFE_BLOCKS - 1) / 2)


def test_protection_survives_a_preemption_and_another_use() -> None:
    pool = BlockPool(8)
    run(pool, "ab", turn("kept"))
    table = BlockTable(pool, pool.lookup(chain("ab")))
    table.release()
    run(pool, "cd")
    assert evicted(pool, 2) == ["cd", "c"]


class LeastRecentlyUsed:
    """The order as it was before there were sessions, in plain words and in time that grows with the blocks."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.used: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self.used

    def __iter__(self) -> Iterator[int]:
        return iter(self.used)

    def __delitem__(self, block: int) -> None:
        del self.used[block]

    def add(self, block: int, is_leaf: bool, keep: object = None) -> None:
        self.used[block] = None

    def touch(self, block: int) -> None:
        self.used.move_to_end(block)

    def forget(self, block: int) -> None:
        pass

    def on_leaf(self, block: int) -> None:
        pass

    def check(self) -> None:
        pass

    def take(self) -> int | None:
        leaves = [block for block in self.used if self._pool._is_leaf(block)]
        unwatched = [block for block in leaves if not self._pool._is_watched(block)]
        return next(iter([*unwatched, *leaves]), None)

    @property
    def oldest(self) -> int:
        return next(iter(self.used))


PROMPTS = st.text("xy", max_size=5)
OPERATIONS = st.one_of(
    st.tuples(st.just("begin"), PROMPTS, st.booleans()),
    st.tuples(st.just("end"), st.integers(0, 7)),
    st.tuples(st.just("touch"), PROMPTS),
    st.tuples(st.just("watch"), PROMPTS),
    st.tuples(st.just("unwatch"), st.integers(0, 7)),
    st.tuples(st.just("distrust"), st.integers(0, 7)),
)


class Lives:
    """The same operations on one pool. Sessions by chance, where it has them."""

    def __init__(self, pool: BlockPool, with_sessions: bool = False) -> None:
        self.pool = pool
        self.tables: list[BlockTable] = []
        self.watches: list[Watch] = []
        self.journal = pool.keep_journal()
        self._with_sessions = with_sessions
        self._now = 0.0

    def carry_out(self, operation: tuple[object, ...]) -> object:
        match operation:
            case ("begin", str(prompt), bool(publishes)):
                try:
                    acquired = acquire(self.pool, chain(prompt), len(prompt) + 1)
                except OutOfBlocks as refusal:
                    return str(refusal)
                if publishes:
                    acquired.table.publish(chain(prompt))
                self.tables.append(acquired.table)
                return acquired.table.blocks
            case ("end", int(number)) if self.tables:
                self._end(self.tables.pop(number % len(self.tables)), number)
            case ("touch", str(prompt)):
                return self.pool.touch(chain(prompt))
            case ("watch", str(prompt)):
                self.watches.append(self.pool.watch(chain(prompt)))
            case ("unwatch", int(number)) if self.watches:
                self.pool.unwatch(self.watches.pop(number % len(self.watches)))
            case ("distrust", int(number)) if self.tables:
                self.pool.distrust(self.tables[number % len(self.tables)].blocks)
        return None

    def _end(self, table: BlockTable, number: int) -> None:
        if not self._with_sessions or number == 0:
            table.release()
            return
        self._now += number
        asked = SessionTurn(
            bytes([number % 5]), bytes([number % 2]), self._now, (None, 3.0, 0.0)[number % 3], done=number == 6
        )
        session = self.pool.order.sessions.begin(asked)
        self.pool.order.sessions.end(session, asked, len(table.blocks))
        table.release(session.keep)

    def state(self) -> object:
        changes = self.journal.take()
        broken = [watch.broken for watch in self.watches]
        return self.pool.counts, broken, changes


@settings(max_examples=150, deadline=None)
@given(st.lists(OPERATIONS, max_size=60), st.integers(4, 10))
def test_without_sessions_the_order_is_that_of_the_least_recently_used(
    operations: list[tuple[object, ...]], total: int
) -> None:
    pools = BlockPool(total), BlockPool(total)
    pools[1]._cached = LeastRecentlyUsed(pools[1])  # type: ignore[assignment]
    ours, plain = (Lives(pool) for pool in pools)
    for operation in operations:
        assert ours.carry_out(operation) == plain.carry_out(operation)
        assert ours.state() == plain.state()
        ours.pool.check_conservation()


@settings(max_examples=150, deadline=None)
@given(st.lists(OPERATIONS, max_size=60), st.integers(4, 10))
def test_prefix_of_a_hit_is_a_hit_and_no_block_is_lost_with_sessions(
    operations: list[tuple[object, ...]], total: int
) -> None:
    lives = Lives(BlockPool(total), with_sessions=True)
    for operation in operations:
        protected = lives.pool.order.evictions.protected
        unprotected = {
            block
            for block in lives.pool.order
            if (keep := lives.pool.order._keeps.get(block)) is None or keep.state is not RetentionState.PROTECTED
        }
        lives.carry_out(operation)
        lives.pool.check_conservation()
        if lives.pool.order.evictions.protected > protected and not lives.watches:
            left = {block for block in unprotected if block in lives.pool.order and lives.pool._is_leaf(block)}
            assert not left, "a protected block went before one that was not"


@pytest.mark.parametrize("count", [100, 10_000])
def test_entries_that_are_out_of_date_are_bounded(count: int) -> None:
    pool = BlockPool(4)
    run(pool, "ab")
    for _ in range(count):
        pool.touch(chain("ab"))
    assert len(pool.order._others) <= 2 * 4 + 65
