"""Which blocks of the KV pool are free, held or cached, and by how many: numbers and names, not memory.

A held block has one or more references. A cached block has none, is complete, and is found by its hash until evicted.
If a block can be found, so can all blocks of its prefix.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from baton.engine.kv_cache.eviction import EvictionOrder
from baton.engine.kv_cache.sessions import SessionRetention
from baton.text.block_groups import ONE_GROUP, BlockGroups


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

    def release(self, block: int, keep: SessionRetention | None = None) -> None:
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
