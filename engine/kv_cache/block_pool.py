"""Which blocks of the KV pool are free, held or cached, and by how many: numbers and names, not memory.

A held block has one or more references. A cached block has none, is complete, and is found by its hash until evicted.
If a block can be found, so can all blocks of its prefix.
"""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from baton.engine.kv_cache.eviction import EvictionOrder
from baton.engine.kv_cache.sessions import Keep
from baton.engine.request import BlockCopy
from baton.text.block_groups import ONE_GROUP, BlockGroups, Link


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """Hashes that can be found now and could not before, and the reverse. No hash is in both."""

    stored: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


class CacheJournal:
    """Written by a BlockPool on its thread, read on any. A hash that came and went between two reads counts as evicted.

    `notify` is called on the writer's thread at the first change after a read, and must only schedule the next read.
    """

    def __init__(self, notify: Callable[[], None] = lambda: None) -> None:
        self._notify = notify
        self._notified = False
        self._found: deque[tuple[bytes, bool]] = deque()  # whether each can be found from then on

    def take(self) -> CacheChanges | None:
        """The changes since the last call; None where there are none."""
        self._notified = False  # first: a later write is either read below or notified of
        last: dict[bytes, bool] = {}
        while self._found:
            block_hash, found = self._found.popleft()
            last[block_hash] = found
        if not last:
            return None
        stored = tuple(block_hash for block_hash, found in last.items() if found)
        return CacheChanges(stored, tuple(block_hash for block_hash, found in last.items() if not found))

    def write(self, block_hash: bytes, found: bool) -> None:
        """From now on it can be found, or no longer."""
        self._found.append((block_hash, found))
        if not self._notified:
            self._notified = True
            self._notify()


class BlockError(Exception):
    """Blocks were used against the rules: a fault of this program, never of a request."""


class OutOfBlocks(Exception):
    """Not enough blocks are free or cached. Nothing was taken."""

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(f"{wanted} blocks wanted, {available} available")
        self.wanted = wanted
        self.available = available


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by state; free + cached + held = total."""

    total: int
    free: int
    cached: int
    held: int


@dataclass(frozen=True, slots=True)
class Published:
    """The name of a complete block: chained, so a hash stands for every token up to the block's end."""

    block_hash: bytes
    parent_hash: bytes | None  # None: the first block of a prompt


@dataclass(eq=False, slots=True)
class Watch:
    """Blocks that a reader reads without holding them: room for work is never kept back for a reader.

    `broken` turns true, for good, before the first of them is given to another owner; any thread may look.
    """

    blocks: tuple[int, ...]
    broken: bool = False


class BlockPool:
    """References, free list and prefix cache of `total_blocks` blocks with ids [0, total_blocks)."""

    def __init__(self, total_blocks: int, groups: BlockGroups = ONE_GROUP) -> None:
        self.groups = groups
        self.column_blocks = groups.count
        self._references = [0] * total_blocks
        self._free = list(range(total_blocks - 1, -1, -1))  # a stack: low ids first, neighbours together
        self._cached = EvictionOrder(total_blocks, self._is_leaf, self._is_watched)
        self._published: dict[int, Published] = {}
        self._by_hash: dict[bytes, int] = {}
        self._children: Counter[bytes] = Counter()  # published blocks by the hash of their parent
        self._watches: dict[int, set[Watch]] = {}  # by block
        self._journal: CacheJournal | None = None  # None: no reader follows the cache

    @property
    def total_blocks(self) -> int:
        return len(self._references)

    @property
    def counts(self) -> BlockCounts:
        total, free, cached = self.total_blocks, len(self._free), len(self._cached.used)
        return BlockCounts(total, free, cached, held=total - free - cached)

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free ones, and cached ones after their eviction."""
        return len(self._free) + len(self._cached.used)

    @property
    def order(self) -> EvictionOrder:
        """The cached blocks, and the sessions that they are kept for."""
        return self._cached

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks with one reference each, all or none; evicts cached ones where too few are free.

        Raises: OutOfBlocks.
        """
        available = self.available
        if count > available:
            raise OutOfBlocks(count, available)
        while len(self._free) < count:
            self._evict_one()
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """Adds a reference to a held block."""
        self._require_held(block)
        self._references[block] += 1

    def release(self, block: int, keep: Keep | None = None) -> None:
        """Gives back one reference; the last one leaves a published block cached and any other free.

        `keep`: of the session whose turn used it.
        """
        self._require_held(block)
        self._references[block] -= 1
        if self._references[block] > 0:
            return
        published = self._published.get(block)
        if published is None:
            self._free.append(block)
        else:
            self._cached.add(block, published.block_hash not in self._children, keep)

    def publish(self, block: int, block_hash: bytes, parent_hash: bytes | None) -> None:
        """Names a held block whose KV is written for all its tokens. A hash that has a block already keeps it.

        A block whose parent cannot be found gets no name: nor could it be.
        """
        self._require_held(block)
        if block_hash in self._by_hash or (parent_hash is not None and parent_hash not in self._by_hash):
            return
        if block in self._published:
            raise BlockError(f"block {block} is published under another hash")
        self._published[block] = Published(block_hash, parent_hash)
        self._by_hash[block_hash] = block
        if parent_hash is not None:
            self._children[parent_hash] += 1
        if self._journal is not None:
            self._journal.write(block_hash, found=True)

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix of `hashes`, with a reference taken on each."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1
            blocks.append(block)
        return blocks

    def known_columns(self, hashes: Sequence[bytes], first_live: int | None = None) -> int:
        """See `BlockGroups.known_columns`: of what can be found now."""
        return self.groups.known_columns(hashes, self._by_hash.__contains__, first_live)

    def watch(self, hashes: Sequence[bytes]) -> Watch:
        """The blocks of the longest known prefix of `hashes`, which count as just used; to be ended by `unwatch`."""
        return self._watch(self.touch(hashes))

    def watch_each(self, hashes: Sequence[bytes]) -> list[Watch]:
        """A watch for each of `hashes` by itself, of one block or none; none of them counts as used."""
        found = map(self._by_hash.get, hashes)
        return [self._watch(() if block is None else (block,)) for block in found]

    def keep_journal(self, notify: Callable[[], None] = lambda: None) -> CacheJournal:
        """Notes down from now on which hashes can be found and which no longer, beginning with those that can be now.

        There is one journal at a time: an earlier one gets no more changes. For `notify` see there.
        """
        journal = self._journal = CacheJournal(notify)
        for block_hash in self._by_hash:
            journal.write(block_hash, found=True)
        return journal

    def touch(self, hashes: Sequence[bytes]) -> tuple[int, ...]:
        """The blocks of the longest known prefix of `hashes`, which count as just used. No reference is taken."""
        known = takewhile(lambda block: block is not None, map(self._by_hash.get, hashes))
        blocks = tuple(block for block in known if block is not None)
        for block in reversed(blocks):  # the first one last: it is evicted after those that follow it
            if block in self._cached:
                self._cached.touch(block)
        return blocks

    def touch_columns(self, hashes: Sequence[bytes]) -> int:
        """As `touch`, of all blocks that make a prefix of `hashes` reusable. Returns its columns."""
        if self.column_blocks == 1:
            return len(self.touch(hashes))
        columns = self.known_columns(hashes)
        self.touch(self.groups.names(hashes[:columns]))
        return columns

    def is_named(self, block_hash: bytes) -> bool:
        """Whether a block of this name can be found."""
        return block_hash in self._by_hash

    def unwatch(self, watch: Watch) -> None:
        """These blocks have no reader any more. A second call changes nothing."""
        for block in watch.blocks:
            watches = self._watches.get(block, set())
            watches.discard(watch)
            if not watches:
                self._watches.pop(block, None)

    def distrust(self, blocks: Iterable[int]) -> None:
        """Their KV may be wrong: neither they nor blocks computed after them can be found any more."""
        for block in blocks:
            if block in self._published:
                self._forget_below(block)
                self._forget(block)

    def held_only_by(self, owners: Iterable[Sequence[int]]) -> int:
        """How many held blocks have no reference but those of `owners`, each a list of blocks."""
        owned = Counter(block for blocks in owners for block in blocks)
        return sum(1 for block, references in owned.items() if self._references[block] == references)

    def check_conservation(self) -> None:
        """Asserts that every block is in exactly one state and that all indexes agree. Walks the whole pool."""
        free, cached = set(self._free), set(self._cached)
        held = {block for block, references in enumerate(self._references) if references > 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & cached or free & held or cached & held), "a block is in two states"
        assert len(free) + len(cached) + len(held) == self.total_blocks, "a block is in no state"
        assert all(references >= 0 for references in self._references), "a block has negative references"
        assert not free & self._published.keys(), "a free block is published"
        assert cached <= self._published.keys(), "a cached block has no hash"
        assert self._watches.keys() <= self._published.keys(), "a block without a hash is watched"
        named = {published.block_hash: block for block, published in self._published.items()}
        assert named == self._by_hash, "hashes and blocks disagree"
        parents = Counter(published.parent_hash for published in self._published.values())
        del parents[None]
        assert parents == self._children, "counts of children are wrong"
        assert parents.keys() <= named.keys(), "a block can be found and its parent cannot"
        self._cached.check()

    def _watch(self, blocks: tuple[int, ...]) -> Watch:
        watch = Watch(blocks)
        for block in blocks:
            self._watches.setdefault(block, set()).add(watch)
        return watch

    def _evict_one(self) -> None:
        """Frees the first cached block, in their order, that has no children.

        Where two sequences computed the same parent and only one copy was published, all may have some. Watched blocks
        go only where nothing else is left, and their watches are marked broken first.
        """
        block = self._cached.take()
        if block is None:
            block = self._cached.oldest
            self._forget_below(block)
        self._forget(block)

    def _is_leaf(self, block: int) -> bool:
        return self._published[block].block_hash not in self._children

    def _is_watched(self, block: int) -> bool:
        return block in self._watches

    def _forget_below(self, block: int) -> None:
        """Every cached block has a child that is held, in a table with its own copy of the cached block. Rare."""
        below: dict[bytes | None, list[int]] = {}
        for other, published in self._published.items():
            below.setdefault(published.parent_hash, []).append(other)
        doomed = [block]
        for parent in doomed:
            doomed += below.get(self._published[parent].block_hash, [])
        for other in reversed(doomed[1:]):
            self._forget(other)

    def _forget(self, block: int) -> None:
        """Takes a block's name, and frees it if that was all that kept it."""
        for watch in self._watches.pop(block, ()):
            watch.broken = True
        published = self._published.pop(block)
        block_hash, parent_hash = published.block_hash, published.parent_hash
        del self._by_hash[block_hash]
        if self._journal is not None:
            self._journal.write(block_hash, found=False)
        if parent_hash is not None:
            self._children[parent_hash] -= 1
            if self._children[parent_hash] == 0:
                del self._children[parent_hash]
                self._cached.on_leaf(self._by_hash[parent_hash])
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)
        self._cached.forget(block)

    def _require_held(self, block: int) -> None:
        if self._references[block] == 0:
            raise BlockError(f"block {block} is not held")


class BlockTable:
    """The blocks of one sequence, column after column and of each group in turn: a value that is released exactly once.

    It holds a reference on each of them, which its maker has taken. Of windowed groups only those from column
    `first_live` on are held: before that the table repeats its first block, which no window reads.
    """

    def __init__(self, pool: BlockPool, blocks: Sequence[int], first_live: int = 0) -> None:
        self._pool = pool
        self._blocks = tuple(blocks)
        self._first_live = first_live
        self._numbers: array[int] | None = None  # of `_blocks` as they are
        self._released = False

    @property
    def numbers(self) -> "array[int]":
        """As `blocks`, in one piece of memory: steps are made of them. Not to be changed. Raises: BlockError."""
        blocks = self.blocks
        if self._numbers is None:
            self._numbers = array("q", blocks)
        return self._numbers

    @property
    def blocks(self) -> tuple[int, ...]:
        """Raises: BlockError after the release, since the blocks may be someone else's by then."""
        if self._released:
            raise BlockError("the block table was released")
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
        """Of these columns, in order; of windowed groups those from `first_live` on, if it holds them."""
        whole, count = self.groups.whole, self.groups.count
        if whole == count:
            return self.blocks[begin:end]
        first = max(first_live, self._first_live)
        return tuple(
            block for index in range(begin, end) for block in self.column(index)[: count if index >= first else whole]
        )

    @property
    def held_blocks(self) -> tuple[int, ...]:
        return self.held(0, self.columns)

    def append(self, columns: int) -> None:
        """Adds so many with fresh blocks, all or none. Raises: OutOfBlocks."""
        held, fresh = self.blocks, self._pool.allocate(columns * self.groups.count)
        self._blocks = (*held, *fresh)
        if self._numbers is not None:
            self._numbers = self._numbers + array("q", fresh)  # another array: a step may have this one

    def fork(self, columns: int) -> "BlockTable":
        """Another table over the first columns, whose blocks are shared from now on."""
        for block in self.held(0, columns):
            self._pool.share(block)
        return BlockTable(self._pool, self.blocks[: columns * self.groups.count], self._first_live)

    def make_writable(self, column: int) -> list[BlockCopy]:
        """Puts fresh blocks in place of shared ones; returns the copies to make before they are written.

        Raises: OutOfBlocks.
        """
        count, held = self._pool.column_blocks, self.blocks
        places = range(column * count, (column + 1) * count)
        shared = [place for place in places if self._pool.references(held[place]) > 1]
        if not shared:
            return []
        blocks, copies = list(held), []
        for place, destination in zip(shared, self._pool.allocate(len(shared)), strict=True):
            copies.append(BlockCopy(blocks[place], destination))
            self._pool.release(blocks[place])
            blocks[place] = destination
        self._replace(blocks)
        return copies

    def grow(self, position: int, block_tokens: int) -> list[BlockCopy]:
        """Makes the blocks of `position` exist and be this table's alone; returns the copies to make before they are
        written. Raises: OutOfBlocks.
        """
        column = position // block_tokens
        if column == self.columns:
            self.append(1)
        return self.make_writable(column)

    def publish(self, hashes: Sequence[bytes], named_columns: int = 0) -> None:
        """Names the blocks of the first columns, whose KV is complete, for the prefix cache.

        `named_columns`: so many were before; of these, only those whose names were lost since are looked at again.
        """
        is_named = self._pool.is_named
        for column, block_hash in enumerate(hashes[: self.columns]):
            if column < named_columns and is_named(block_hash):
                continue
            links = self.groups.column_links(block_hash, hashes[column - 1] if column else None)
            for block, link in zip(self.held(column, column + 1), links, strict=False):
                self._pool.publish(block, link.name, link.parent)

    def pass_over(self, column: int) -> None:
        """No window reads columns before this one any more: their blocks are given back."""
        groups = self.groups
        if groups.windowed == 0 or column <= self._first_live:
            return
        blocks = list(self.blocks)
        for index in reversed(range(self._first_live, min(column, self.columns))):
            for place in reversed(range(index * groups.count + groups.whole, (index + 1) * groups.count)):
                self._pool.release(blocks[place])
                blocks[place] = blocks[0]
        self._first_live = column
        self._replace(blocks)

    def release(self, keep: Keep | None = None) -> None:
        """Gives all blocks back, the last first, so that the cache meets leaves before their parents.

        `keep`: of the session whose turn this was. Raises: BlockError the second time.
        """
        blocks = self.held_blocks
        self._released = True
        for block in reversed(blocks):
            self._pool.release(block, keep)

    def _replace(self, blocks: Sequence[int]) -> None:
        self._blocks = tuple(blocks)
        self._numbers = None


@dataclass(frozen=True, slots=True)
class Acquired:
    """A new table whose first `cached_columns` columns came from the prefix cache, their KV complete."""

    table: BlockTable
    cached_columns: int


def acquire(
    pool: BlockPool,
    hashes: Sequence[bytes],
    columns: int,
    spare_blocks: int = 0,
    first_live: int | None = None,
) -> Acquired:
    """A table of so many columns: the longest cached prefix of `hashes`, then fresh blocks; all or none.

    `hashes` has at most `columns` entries; `spare_blocks` stay available. `first_live`: windows need their blocks from
    this column on; None: as they do to go on behind the cached prefix. Raises: OutOfBlocks.
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
    if wanted + spare_blocks > pool.available:
        refusal = OutOfBlocks(wanted + spare_blocks, pool.available)
        for block in reversed(found):
            pool.release(block)
        raise refusal
    fresh = pool.allocate(wanted)
    if groups.count == 1:
        return Acquired(BlockTable(pool, [*found, *fresh]), cached)
    needed, blocks = iter([*found, *fresh]), list[int]()
    for column in range(columns):
        blocks += [next(needed) for _ in range(groups.whole)]
        blocks += [next(needed) if column >= first else blocks[0] for _ in range(groups.windowed)]
    return Acquired(BlockTable(pool, blocks, first), cached)


class NamedBlocks:
    """Blocks that are being filled, each under its name: a value that is released exactly once.

    The first `cached` of them were here before.
    """

    def __init__(self, pool: BlockPool, links: Sequence[Link], windowed: int) -> None:
        """`windowed`: so many of the first ones hang on later ones. Raises: OutOfBlocks, and nothing was taken."""
        self._pool, self._links, self._windowed = pool, tuple(links), windowed
        found = pool.lookup([link.name for link in links])
        try:
            fresh = pool.allocate(len(links) - len(found))
        except OutOfBlocks:
            for block in reversed(found):
                pool.release(block)
            raise
        self.blocks, self.cached = (*found, *fresh), len(found)
        self._released = False

    @property
    def names(self) -> tuple[bytes, ...]:
        return tuple(link.name for link in self._links)

    def publish(self, count: int) -> None:
        """The KV of the first so many is there."""
        landed = list(zip(self.blocks[:count], self._links[:count], strict=True))
        for block, link in landed[self._windowed :] + landed[: self._windowed]:
            self._pool.publish(block, link.name, link.parent)

    def release(self, keep: Keep | None = None) -> None:
        """Gives all of them back, leaves before their parents. Raises: BlockError the second time."""
        if self._released:
            raise BlockError("the blocks were released")
        self._released = True
        for block in (*self.blocks[: self._windowed], *reversed(self.blocks[self._windowed :])):
            self._pool.release(block, keep)


class SwapSpace:
    """`total_slots` slots of host memory, of one KV block each, with ids [0, total_slots): for preempted sequences."""

    def __init__(self, total_slots: int) -> None:
        self.total_slots = total_slots
        self._free = list(range(total_slots - 1, -1, -1))

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def take(self, count: int) -> "SwapSlots | None":
        """`count` slots, all or none."""
        if count > len(self._free):
            return None
        return SwapSlots(self, tuple(self._free.pop() for _ in range(count)))

    def give_back(self, slots: tuple[int, ...]) -> None:
        """Only for SwapSlots, which does it once."""
        self._free.extend(reversed(slots))


class SwapSlots:
    """Slots that hold the first blocks of one sequence, in order: a value that is released exactly once."""

    def __init__(self, space: SwapSpace, slots: tuple[int, ...]) -> None:
        self._space = space
        self._slots = slots
        self._released = False

    @property
    def slots(self) -> tuple[int, ...]:
        """Raises: BlockError after the release, since the slots may be someone else's by then."""
        if self._released:
            raise BlockError("the swap slots were released")
        return self._slots

    def release(self) -> None:
        """Raises: BlockError the second time."""
        slots = self.slots
        self._released = True
        self._space.give_back(slots)
