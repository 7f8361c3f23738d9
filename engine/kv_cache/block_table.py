"""Block table of one sequence, and its allocation from the pool and the prefix cache."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.kv_cache.block_pool import BlockError, BlockPool, OutOfBlocks
from baton.engine.kv_cache.sessions import SessionRetention
from baton.engine.request import BlockCopy
from baton.text.block_groups import BlockGroups


class BlockTable:
    """Blocks of one sequence, ordered by column, then by group; released exactly once.

    The table owns a reference on each block, taken by its creator. Windowed groups hold blocks only from column
    `first_live` on; earlier entries repeat a block of the table, which no window reads there.
    """

    def __init__(self, pool: BlockPool, blocks: Sequence[int], first_live: int = 0) -> None:
        self._pool = pool
        self._blocks = tuple(blocks)
        self._first_live = first_live
        self._numbers: array[int] | None = None  # cached array of `_blocks`
        self._released = False
        self.own_column: int | None = None
        """Column that is being written and has no other owner; None: not known."""

    @property
    def numbers(self) -> "array[int]":
        """Block ids as a contiguous array, which steps read. Read-only. Raises: BlockError after the release."""
        if self._numbers is None:
            self._numbers = array("q", self.blocks)
        return self._numbers

    @property
    def blocks(self) -> tuple[int, ...]:
        """Block ids. Raises: BlockError after the release, when the blocks may have other owners."""
        if self._released:
            raise BlockError("the block table was already released")
        return self._blocks

    @property
    def groups(self) -> BlockGroups:
        return self._pool.groups

    @property
    def columns(self) -> int:
        return len(self.blocks) // self._pool.column_blocks

    @property
    def first_live(self) -> int:
        return self._first_live

    def column(self, index: int) -> tuple[int, ...]:
        count = self._pool.column_blocks
        return self.blocks[index * count : (index + 1) * count]

    def held(self, begin: int, end: int, first_live: int = 0) -> tuple[int, ...]:
        """Return the blocks held in columns [begin, end); of windowed groups only those from `first_live` on."""
        whole, count = self.groups.whole, self.groups.count
        if whole == count:
            return self.blocks[begin:end]
        first = max(first_live, self._first_live)
        return tuple(
            block for index in range(begin, end) for block in self.column(index)[: count if index >= first else whole]
        )

    def shared_in_windows(self, first_live: int) -> int:
        """Return the number of windowed blocks from column `first_live` on that others hold, too."""
        columns = range(max(first_live, self._first_live), self.columns)
        windowed = (block for index in columns for block in self.column(index)[self.groups.whole :])
        return sum(self._pool.references(block) > 1 for block in windowed)

    @property
    def held_blocks(self) -> tuple[int, ...]:
        return self.held(0, self.columns)

    def append(self, columns: int) -> None:
        """Append columns of fresh blocks, all or none. Raises: OutOfBlocks."""
        held, fresh = self.blocks, self._pool.allocate(columns * self.groups.count)
        self._blocks = (*held, *fresh)
        if self._numbers is not None:
            self._numbers = self._numbers + array("q", fresh)  # new array: a step may still use the old one

    def fork(self, columns: int) -> "BlockTable":
        """Return another table over the first `columns` columns, which shares their blocks."""
        self.own_column = None
        for block in self.held(0, columns):
            self._pool.share(block)
        return BlockTable(self._pool, self.blocks[: columns * self.groups.count], self._first_live)

    def make_writable(self, column: int) -> list[BlockCopy]:
        """Replace shared blocks of a column by fresh ones; return the block copies that must precede any write.

        Raises: OutOfBlocks.
        """
        count, held, references = self._pool.column_blocks, self.blocks, self._pool.references
        shared = [place for place in range(column * count, (column + 1) * count) if references(held[place]) > 1]
        if not shared:
            self.own_column = column
            return []
        blocks, copies = list(held), []
        for place, destination in zip(shared, self._pool.allocate(len(shared)), strict=True):
            copies.append(BlockCopy(blocks[place], destination))
            self._pool.release(blocks[place])
            blocks[place] = destination
        self._replace(blocks)
        self.own_column = column
        return copies

    def grow(self, position: int, block_tokens: int) -> list[BlockCopy]:
        """Make `position` writable: allocate its column, or replace its shared blocks; return the copies to make first.

        Raises: OutOfBlocks.
        """
        column = position // block_tokens
        if column == self.columns:
            self.append(1)
            self.own_column = column
            return []
        return self.make_writable(column)

    def publish(self, hashes: Sequence[bytes], named_columns: int = 0) -> None:
        """Publish the blocks of the first columns, whose KV is complete, to the prefix cache.

        `named_columns`: columns published before; they are published again only if their name was lost.
        """
        is_named, first = self._pool.is_named, 0 if self.groups.whole else self._first_live
        for column, block_hash in enumerate(hashes[first : self.columns], first):
            if column < named_columns and is_named(block_hash):
                continue
            links = self.groups.column_links(block_hash, hashes[column - 1] if column else None)
            for block, link in zip(self.held(column, column + 1), links, strict=False):
                self._pool.publish(block, link.name, link.parent)

    def pass_over(self, column: int) -> None:
        """Release the windowed blocks before `column`, which no window reads any more."""
        groups = self.groups
        if groups.windowed == 0 or column <= self._first_live:
            return
        blocks = list(self.blocks)
        unread = blocks[0 if groups.whole else column * groups.count]
        for index in reversed(range(self._first_live, min(column, self.columns))):
            for place in reversed(range(index * groups.count + groups.whole, (index + 1) * groups.count)):
                self._pool.release(blocks[place])
                blocks[place] = unread
        if not groups.whole:
            blocks[: column * groups.count] = [unread] * (column * groups.count)
        self._first_live = column
        self._replace(blocks)

    def release(self, keep: SessionRetention | None = None) -> None:
        """Release all blocks, the last first, so that the cache sees leaves before their parents.

        `keep`: retention of the session whose turn this was. Raises: BlockError the second time.
        """
        blocks = self.held_blocks
        self._released, self._numbers = True, None
        for block in reversed(blocks):
            self._pool.release(block, keep)

    def _replace(self, blocks: Sequence[int]) -> None:
        self._blocks = tuple(blocks)
        self._numbers = None


@dataclass(frozen=True, slots=True)
class Acquired:
    """New table whose first `cached_columns` columns are complete blocks from the prefix cache."""

    table: BlockTable
    cached_columns: int


def acquire(
    pool: BlockPool,
    hashes: Sequence[bytes],
    columns: int,
    spare_blocks: int = 0,
    first_live: int | None = None,
    taken_columns: int | None = None,
) -> Acquired:
    """Create a table of `columns` columns: the longest cached prefix of `hashes`, then fresh blocks; all or none.

    `hashes` has at most `columns` entries. `spare_blocks`: number of blocks to leave available. `first_live`: first
    column that windows need; by default, the first one needed to continue after the prefix. `taken_columns`: number of
    columns to take now, with at least the cached ones; by default all. The others must be available too, as far as
    windows need them at a time. Raises: OutOfBlocks.
    """
    groups = pool.groups
    cached = pool.known_columns(hashes, first_live)
    first = groups.first_live_behind(cached) if first_live is None else first_live
    found = pool.lookup(
        [
            groups.name(block_hash, group)
            for column, block_hash in enumerate(hashes[:cached])
            for group in range(groups.count if column >= first else groups.whole)
        ]
    )
    wanted = groups.blocks(columns, first) - len(found)
    if taken_columns is not None and groups.windowed:
        # Blocks in the window become available once passed, except those that others hold, too.
        in_window = found[groups.whole * min(first, cached) :]
        shared = sum(
            pool.references(block) > 1 for place, block in enumerate(in_window) if place % groups.count >= groups.whole
        )
        wanted = min(wanted, groups.most_blocks(columns, first) - len(found) + shared)
    columns = columns if taken_columns is None else max(cached, taken_columns)
    if wanted + spare_blocks > pool.available:
        refusal = OutOfBlocks(wanted + spare_blocks, pool.available)
        for block in reversed(found):
            pool.release(block)
        raise refusal
    fresh = pool.allocate(groups.blocks(columns, first) - len(found))
    if not groups.windowed and groups.count == 1:
        return Acquired(BlockTable(pool, [*found, *fresh]), cached)
    held = [*found, *fresh]
    needed, blocks, unread = iter(held), list[int](), held[:1]  # if any is held, the first one may be repeated
    for column in range(columns):
        blocks += [next(needed) for _ in range(groups.whole)]
        blocks += [next(needed) for _ in range(groups.windowed)] if column >= first else unread * groups.windowed
    return Acquired(BlockTable(pool, blocks, first), cached)
