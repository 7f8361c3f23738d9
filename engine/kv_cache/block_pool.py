"""State of every KV block (free, held or cached) and the prefix cache: numbers and hashes, not memory.

A held block has one or more references. A cached block has none, is complete, and is found by its hash until evicted.
If a block can be found, so can all blocks of its prefix, unless windows do not need them (text/block_groups.py).
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
    """Hashes added to the prefix cache, and hashes removed from it. No hash is in both."""

    stored: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


class CacheJournal:
    """Journal of cache changes. A BlockPool writes it on its thread; any thread may read it.

    A hash that is stored and evicted between two reads counts as evicted.

    `notify` is called on the writer's thread at the first change after a read, and must only schedule the next read.
    """

    def __init__(self, notify: Callable[[], None] = lambda: None) -> None:
        self._notify = notify
        self._notified = False
        self._found: deque[tuple[bytes, bool]] = deque()  # changes: a hash, and whether lookups find it now

    def take(self) -> CacheChanges | None:
        """Return the changes since the last call, or None if there are none."""
        self._notified = False  # reset before reading: a later write is either read below or notified
        last: dict[bytes, bool] = {}
        while self._found:
            block_hash, found = self._found.popleft()
            last[block_hash] = found
        if not last:
            return None
        stored = tuple(block_hash for block_hash, found in last.items() if found)
        return CacheChanges(stored, tuple(block_hash for block_hash, found in last.items() if not found))

    def write(self, block_hash: bytes, found: bool) -> None:
        """Record a change of a hash. `found`: whether lookups find it from now on."""
        self._found.append((block_hash, found))
        if not self._notified:
            self._notified = True
            self._notify()


class BlockError(Exception):
    """Violation of the block rules: a bug in this program, never a request's fault."""


class OutOfBlocks(Exception):
    """Too few free and cached blocks. Nothing was allocated."""

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
    """Name of a complete block. Hashes are chained: each covers all tokens up to the block's end."""

    block_hash: bytes
    parent_hash: bytes | None  # None for the first block of a prompt


@dataclass(eq=False, slots=True)
class Watch:
    """Set of blocks that are read without references on them, so that readers never reduce the pool's capacity.

    `broken` becomes true, permanently, before one of the blocks gets another owner; any thread may read it.
    """

    blocks: tuple[int, ...]
    broken: bool = False


class BlockPool:
    """Reference counts, free list and prefix cache of `total_blocks` blocks with ids [0, total_blocks)."""

    def __init__(self, total_blocks: int, groups: BlockGroups = ONE_GROUP) -> None:
        self.groups = groups
        self.column_blocks = groups.count
        self._references = [0] * total_blocks
        self._free = list(range(total_blocks - 1, -1, -1))  # stack, lowest ids on top
        self._cached = EvictionOrder(total_blocks, self._is_leaf, self._is_watched)
        self._published: dict[int, Published] = {}
        self._by_hash: dict[bytes, int] = {}
        self._children: Counter[bytes] = Counter()  # number of published blocks by parent hash
        self._watches: dict[int, set[Watch]] = {}  # watches by block id
        self._journal: CacheJournal | None = None  # None if no reader follows the cache

    @property
    def total_blocks(self) -> int:
        return len(self._references)

    @property
    def counts(self) -> BlockCounts:
        total, free, cached = self.total_blocks, len(self._free), len(self._cached.used)
        return BlockCounts(total, free, cached, held=total - free - cached)

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated: free ones, and cached ones after eviction."""
        return len(self._free) + len(self._cached.used)

    @property
    def order(self) -> EvictionOrder:
        """Cached blocks in eviction order, and the sessions that protect them."""
        return self._cached

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with one reference each, all or none; evict cached ones if too few are free.

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
        """Add a reference to a held block."""
        self._require_held(block)
        self._references[block] += 1

    def release(self, block: int, keep: SessionRetention | None = None) -> None:
        """Drop one reference; the last one leaves a published block cached and any other free.

        `keep`: retention of the session whose turn used the block.
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
        """Name a held block whose KV is complete, so that lookups find it.

        Does nothing if a block already has the hash, or if the parent is not cached: lookups could never reach the
        block.
        """
        self._require_held(block)
        if block_hash in self._by_hash or (parent_hash is not None and parent_hash not in self._by_hash):
            return
        if block in self._published:
            raise BlockError(f"block {block} is already published under another hash")
        self._published[block] = Published(block_hash, parent_hash)
        self._by_hash[block_hash] = block
        if parent_hash is not None:
            self._children[parent_hash] += 1
        if self._journal is not None:
            self._journal.write(block_hash, found=True)

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of `hashes`, with a reference on each."""
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
        """Return the number of reusable cached columns (see `BlockGroups.known_columns`)."""
        return self.groups.known_columns(hashes, self._by_hash.__contains__, first_live)

    def watch(self, hashes: Sequence[bytes]) -> Watch:
        """Watch the longest cached prefix of `hashes`, and mark it as just used. End it with `unwatch`."""
        return self._watch(self.touch(hashes))

    def watch_each(self, hashes: Sequence[bytes]) -> list[Watch]:
        """Return one watch per hash, without blocks if the hash is not cached. Does not mark blocks as used."""
        found = map(self._by_hash.get, hashes)
        return [self._watch(() if block is None else (block,)) for block in found]

    def keep_journal(self, notify: Callable[[], None] = lambda: None) -> CacheJournal:
        """Start a journal of cache changes, beginning with all hashes that can be found now.

        The new journal replaces an earlier one. `notify`: see CacheJournal.
        """
        journal = self._journal = CacheJournal(notify)
        for block_hash in self._by_hash:
            journal.write(block_hash, found=True)
        return journal

    def touch(self, hashes: Sequence[bytes]) -> tuple[int, ...]:
        """Mark the blocks of the longest cached prefix of `hashes` as just used; return them, without references."""
        known = takewhile(lambda block: block is not None, map(self._by_hash.get, hashes))
        blocks = tuple(block for block in known if block is not None)
        for block in reversed(blocks):  # in reverse: a prefix is evicted after its continuation
            if block in self._cached:
                self._cached.touch(block)
        return blocks

    def touch_columns(self, hashes: Sequence[bytes]) -> int:
        """Mark all blocks of the longest reusable prefix of `hashes` as just used. Return its number of columns."""
        if not self.groups.windowed and self.column_blocks == 1:
            return len(self.touch(hashes))
        columns = self.known_columns(hashes)
        self.touch(self.groups.names(hashes[:columns]))
        return columns

    def is_named(self, block_hash: bytes) -> bool:
        """Return whether a block with this hash can be found."""
        return block_hash in self._by_hash

    def unwatch(self, watch: Watch) -> None:
        """End a watch. A second call has no effect."""
        for block in watch.blocks:
            watches = self._watches.get(block, set())
            watches.discard(watch)
            if not watches:
                self._watches.pop(block, None)

    def distrust(self, blocks: Iterable[int]) -> None:
        """Unpublish blocks whose KV may be wrong, and all blocks that were computed from them."""
        for block in blocks:
            if block in self._published:
                self._forget_below(block)
                self._forget(block)

    def held_only_by(self, owners: Iterable[Sequence[int]]) -> int:
        """Count the held blocks that only `owners` hold; each owner is a list of blocks."""
        owned = Counter(block for blocks in owners for block in blocks)
        return sum(1 for block, references in owned.items() if self._references[block] == references)

    def check_conservation(self) -> None:
        """Assert that every block is in exactly one state and all indexes agree. Walks the pool."""
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
        """Free the first cached leaf in eviction order.

        If no cached block is a leaf, free the least recently used block and forget its published descendants. Tables
        that hold a descendant have their own, unpublished copy of the freed block. Watched blocks are evicted last,
        after their watches were marked broken.
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
        """Forget all published descendants of a block. Walks all published blocks, but is rarely called."""
        below: dict[bytes | None, list[int]] = {}
        for other, published in self._published.items():
            below.setdefault(published.parent_hash, []).append(other)
        doomed = [block]
        for parent in doomed:
            doomed += below.get(self._published[parent].block_hash, [])
        for other in reversed(doomed[1:]):
            self._forget(other)

    def _forget(self, block: int) -> None:
        """Remove a block's hash, and free the block if it was cached."""
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
