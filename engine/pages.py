"""Who owns which block of the KV pool, and which blocks are kept as prefix cache. Knows ids and hashes, not memory.

A block is free, held (by one or more references) or cached: held by nobody, complete, and found under its hash.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile


class PageError(Exception):
    """Blocks were used against the rules: a fault of this program, never of a request."""


class OutOfBlocks(Exception):
    """Not enough blocks are free or cached. Nothing was taken."""

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(f"{wanted} blocks wanted, {available} available")
        self.wanted = wanted
        self.available = available


@dataclass(frozen=True, slots=True)
class PageCounts:
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
    """Blocks that someone reads without holding them: room for work is never kept back for a reader.

    `broken` turns true, for good, before the first of them is given to anyone else; any thread may look.
    """

    blocks: tuple[int, ...]
    broken: bool = False


class BlockPool:
    """References, free list and prefix cache of `total_blocks` blocks with ids [0, total_blocks)."""

    def __init__(self, total_blocks: int) -> None:
        self._references = [0] * total_blocks
        self._free = list(range(total_blocks - 1, -1, -1))  # a stack: low ids first, neighbours together
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._published: dict[int, Published] = {}
        self._by_hash: dict[bytes, int] = {}
        self._cached_children: Counter[bytes] = Counter()  # cached blocks by the hash of their parent
        self._watches: dict[int, set[Watch]] = {}  # by block

    @property
    def total_blocks(self) -> int:
        return len(self._references)

    @property
    def counts(self) -> PageCounts:
        total, free, cached = self.total_blocks, len(self._free), len(self._cached)
        return PageCounts(total, free, cached, held=total - free - cached)

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks with one reference each, all or none; evicts cached ones where too few are free.

        Raises: OutOfBlocks.
        """
        available = len(self._free) + len(self._cached)
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

    def release(self, block: int) -> None:
        """Gives back one reference; the last one leaves a published block cached and any other free."""
        self._require_held(block)
        self._references[block] -= 1
        if self._references[block] > 0:
            return
        published = self._published.get(block)
        if published is None:
            self._free.append(block)
            return
        self._cached[block] = None
        if published.parent_hash is not None:
            self._cached_children[published.parent_hash] += 1

    def publish(self, block: int, block_hash: bytes, parent_hash: bytes | None) -> None:
        """Names a held block whose KV is written for all its tokens. A hash that has a block already keeps it."""
        self._require_held(block)
        if block_hash in self._by_hash:
            return
        if block in self._published:
            raise PageError(f"block {block} is published under another hash")
        self._published[block] = Published(block_hash, parent_hash)
        self._by_hash[block_hash] = block

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix of `hashes`, with a reference taken on each."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            if self._references[block] == 0:
                self._leave_cache(block)
            self._references[block] += 1
            blocks.append(block)
        return blocks

    def watch(self, hashes: Sequence[bytes]) -> Watch:
        """The blocks of the longest known prefix of `hashes`, which count as just used; to be ended by `unwatch`."""
        known = takewhile(lambda block: block is not None, map(self._by_hash.get, hashes))
        watch = Watch(tuple(block for block in known if block is not None))
        for block in reversed(watch.blocks):  # the first one last: it is evicted after those that follow it
            self._watches.setdefault(block, set()).add(watch)
            if block in self._cached:
                self._cached.move_to_end(block)
        return watch

    def unwatch(self, watch: Watch) -> None:
        """Nobody reads these blocks any more. A second time it changes nothing."""
        for block in watch.blocks:
            watches = self._watches.get(block, set())
            watches.discard(watch)
            if not watches:
                self._watches.pop(block, None)

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
        parents = Counter(self._published[block].parent_hash for block in cached)
        del parents[None]
        assert parents == self._cached_children, "counts of cached children are wrong"

    def _evict_one(self) -> None:
        """Frees the least recently used cached block without cached children.

        Tables are released from their end, so the oldest block is nearly always such a leaf; it is not where two
        sequences computed the same parent and only one copy was published. Watched blocks go only where nothing else is
        left, and who watches them knows it first.
        """
        oldest = next(iter(self._cached))
        leaves = filter(self._is_leaf, self._cached)
        block = next((leaf for leaf in leaves if leaf not in self._watches), None)
        if block is None:
            block = next(filter(self._is_leaf, self._cached), oldest)
        for watch in self._watches.pop(block, ()):
            watch.broken = True
        self._leave_cache(block)
        published = self._published.pop(block)
        del self._by_hash[published.block_hash]
        self._free.append(block)

    def _is_leaf(self, block: int) -> bool:
        return self._cached_children[self._published[block].block_hash] == 0

    def _leave_cache(self, block: int) -> None:
        del self._cached[block]
        parent_hash = self._published[block].parent_hash
        if parent_hash is not None:
            self._cached_children[parent_hash] -= 1
            if self._cached_children[parent_hash] == 0:
                del self._cached_children[parent_hash]

    def _require_held(self, block: int) -> None:
        if self._references[block] == 0:
            raise PageError(f"block {block} is not held")
