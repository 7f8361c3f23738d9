"""Blocks for received KV, each with the hash of its content."""

from collections.abc import Sequence

from baton.engine.kv_cache.block_pool import BlockError, BlockPool, OutOfBlocks
from baton.engine.kv_cache.sessions import SessionRetention
from baton.text.block_groups import BlockLink


class NamedBlocks:
    """Blocks being filled, each with its hash; released exactly once.

    The first `cached` blocks come from the prefix cache.
    """

    def __init__(self, pool: BlockPool, links: Sequence[BlockLink], windowed: int) -> None:
        """Look up cached blocks and allocate the others, all or none. Raises: OutOfBlocks.

        `windowed`: number of blocks at the start of `links` whose parents come later in `links`.
        """
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
        """Publish the first `count` blocks, whose KV is complete."""
        landed = list(zip(self.blocks[:count], self._links[:count], strict=True))
        for block, link in landed[self._windowed :] + landed[: self._windowed]:
            self._pool.publish(block, link.name, link.parent)

    def release(self, keep: SessionRetention | None = None) -> None:
        """Release all blocks, leaves before their parents. Raises: BlockError the second time."""
        if self._released:
            raise BlockError("the named blocks were already released")
        self._released = True
        for block in (*self.blocks[: self._windowed], *reversed(self.blocks[self._windowed :])):
            self._pool.release(block, keep)
