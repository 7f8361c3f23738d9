"""Which worker probably holds which KV blocks: a prediction from what was sent there. Pure.

A wrong entry costs a worse placement, never a wrong answer.
"""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixIndex:
    """Per worker, the hashes of the blocks it was last told to compute or to take; no more than its pool holds."""

    def __init__(self) -> None:
        self._blocks: dict[str, OrderedDict[bytes, bool]] = {}  # whether they are ready

    def record(self, worker: str, block_hashes: Sequence[bytes], capacity_blocks: int, ready: bool = False) -> None:
        """The worker will hold these blocks; if they are `ready`, it does. The least recently recorded ones beyond its
        capacity are forgotten.
        """
        known = self._blocks.setdefault(worker, OrderedDict())
        # The end of a prompt goes first when a worker must evict: it is made the oldest here as well.
        for block_hash in reversed(block_hashes):
            known[block_hash] = ready or known.get(block_hash, False)
            known.move_to_end(block_hash)
        while len(known) > capacity_blocks:
            known.popitem(last=False)

    def hit_blocks(self, worker: str, block_hashes: Sequence[bytes]) -> int:
        """How many blocks of this prompt, from its beginning, the worker probably holds."""
        known = self._blocks.get(worker)
        if known is None:
            return 0
        return next((i for i, block_hash in enumerate(block_hashes) if block_hash not in known), len(block_hashes))

    def ready_blocks(self, worker: str, block_hashes: Sequence[bytes]) -> int:
        """As `hit_blocks`, without those that may still have to be computed there: what others can fetch."""
        known = self._blocks.get(worker, OrderedDict[bytes, bool]())
        return next((i for i, block_hash in enumerate(block_hashes) if not known.get(block_hash)), len(block_hashes))

    def forget(self, worker: str) -> None:
        """The worker's process is gone, and its pool with it."""
        self._blocks.pop(worker, None)
