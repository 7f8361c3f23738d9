"""Random lives of sequences on a small pool, against a model that keeps every reference in plain lists."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from baton.engine.kv_cache.block_pool import BlockPool, OutOfBlocks
from baton.engine.kv_cache.block_table import BlockTable, acquire

TOTAL = 8
# Prompts over two symbols: few enough that prefixes are shared often.
prompts = st.lists(st.sampled_from(b"xy"), max_size=5).map(bytes)


def chain(prompt: bytes) -> list[bytes]:
    """A hash of each block that covers all before it: the prefix itself."""
    return [prompt[: end + 1] for end in range(len(prompt))]


class PoolLives(RuleBasedStateMachine):
    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.journal = self.pool.keep_journal()
        self.told: set[bytes] = set()  # what can be found, by the journal
        self.alive: list[BlockTable] = []
        self.content: dict[int, bytes] = {}  # what was last written into each block

    @rule(target=tables, prompt=prompts, extra=st.integers(0, 2), finish=st.booleans())
    def begin(self, prompt, extra, finish):
        before = self.pool.counts
        try:
            acquired = acquire(self.pool, chain(prompt), len(prompt) + extra)
        except OutOfBlocks as refusal:
            assert refusal.wanted > refusal.available
            assert self.pool.counts == before
            return multiple()
        blocks, hashes = acquired.table.blocks, chain(prompt)
        assert [self.content[block] for block in blocks[: acquired.cached_columns]] == hashes[: acquired.cached_columns]
        for index, block in enumerate(blocks[acquired.cached_columns :], acquired.cached_columns):
            self.content[block] = prompt[: index + 1] if index < len(prompt) else b"unfinished"
        if finish:
            acquired.table.publish(hashes)
        self.alive.append(acquired.table)
        return acquired.table

    @rule(target=tables, table=tables, count=st.integers(0, 5))
    def fork(self, table, count):
        if table not in self.alive:
            return multiple()
        self.alive.append(table.fork(count))
        return self.alive[-1]

    @rule(table=tables, count=st.integers(0, 3))
    def grow(self, table, count):
        if table not in self.alive:
            return
        available = TOTAL - self.pool.counts.held
        before = table.blocks
        try:
            table.append(count)
            assert count <= available
        except OutOfBlocks:
            assert count > available
            assert table.blocks == before
        for block in table.blocks[len(before) :]:
            self.content[block] = b"unfinished"

    @rule(table=tables)
    def write_last(self, table):
        if table not in self.alive or not table.blocks or self.content[table.blocks[-1]] != b"unfinished":
            return
        try:
            copies = table.make_writable(len(table.blocks) - 1)
        except OutOfBlocks:
            return
        for copy in copies:
            self.content[copy.destination] = b"unfinished"
        assert self.pool.references(table.blocks[-1]) == 1

    @rule(table=consumes(tables))
    def end(self, table):
        if table in self.alive:
            self.alive.remove(table)
            table.release()

    @invariant()
    def every_reference_belongs_to_a_table(self):
        self.pool.check_conservation()
        owned = [block for table in self.alive for block in table.blocks]
        assert [self.pool.references(block) for block in range(TOTAL)] == [owned.count(b) for b in range(TOTAL)]
        assert self.pool.counts.held == len(set(owned)) == self.pool.held_only_by(t.blocks for t in self.alive)

    @rule()
    def read_journal(self):
        changes = self.journal.take()
        if changes is not None:
            self.told = (self.told - set(changes.evicted)) | set(changes.stored)
        assert self.told == self.pool._by_hash.keys()

    def teardown(self):
        for table in self.alive:
            table.release()
        self.pool.check_conservation()
        assert self.pool.counts.held == 0


TestPoolLives = PoolLives.TestCase
TestPoolLives.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
