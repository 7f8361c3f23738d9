"""The blocks of one sequence: a value that holds a reference on each of them and is released exactly once."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.kv_cache.block_pool import BlockPool, OutOfBlocks, PageError
from baton.engine.plan import BlockCopy


class BlockTable:
    """Physical block of each logical block, in order. Takes over references that its maker has taken."""

    def __init__(self, pool: BlockPool, blocks: Sequence[int]) -> None:
        self._pool = pool
        self._blocks = tuple(blocks)
        self._released = False

    @property
    def blocks(self) -> tuple[int, ...]:
        """Raises: PageError after the release, since the blocks may be someone else's by then."""
        if self._released:
            raise PageError("the block table was released")
        return self._blocks

    def append(self, count: int) -> None:
        """Adds `count` fresh blocks, all or none. Raises: OutOfBlocks."""
        self._blocks = (*self.blocks, *self._pool.allocate(count))

    def fork(self, count: int) -> "BlockTable":
        """Another table over the first `count` blocks, which are shared from now on."""
        shared = self.blocks[:count]
        for block in shared:
            self._pool.share(block)
        return BlockTable(self._pool, shared)

    def make_writable(self, index: int) -> BlockCopy | None:
        """Puts a fresh block in place of a shared one; returns the copy to make before it is written.

        Raises: OutOfBlocks.
        """
        source = self.blocks[index]
        if self._pool.references(source) == 1:
            return None
        [destination] = self._pool.allocate(1)
        self._pool.release(source)
        self._blocks = (*self._blocks[:index], destination, *self._blocks[index + 1 :])
        return BlockCopy(source, destination)

    def publish(self, hashes: Sequence[bytes]) -> None:
        """Names the first blocks, whose KV is complete, for the prefix cache."""
        parent_hash: bytes | None = None
        for block, block_hash in zip(self.blocks, hashes, strict=False):
            self._pool.publish(block, block_hash, parent_hash)
            parent_hash = block_hash

    def release(self) -> None:
        """Gives all blocks back, the last first, so that the cache meets leaves before their parents.

        Raises: PageError the second time.
        """
        blocks = self.blocks
        self._released = True
        for block in reversed(blocks):
            self._pool.release(block)


@dataclass(frozen=True, slots=True)
class Acquired:
    """A new table whose first `cached_blocks` blocks came from the prefix cache, their KV complete."""

    table: BlockTable
    cached_blocks: int


def acquire(pool: BlockPool, hashes: Sequence[bytes], total_blocks: int) -> Acquired:
    """A table of `total_blocks` blocks: the longest cached prefix of `hashes`, then fresh ones; all or none.

    `hashes` has at most `total_blocks` entries. Raises: OutOfBlocks.
    """
    cached = pool.lookup(hashes)
    try:
        fresh = pool.allocate(total_blocks - len(cached))
    except OutOfBlocks:
        BlockTable(pool, cached).release()
        raise
    return Acquired(BlockTable(pool, cached + fresh), len(cached))
