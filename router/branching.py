"""Where prompts part: how many went on in their own way behind a block that was known. Pure.

Behind the last block of a conversation goes on one, its next turn. Behind a system prompt or a document that many ask
about, many do: whoever computes that again on another worker does it for all that come after.
"""

from collections import OrderedDict
from collections.abc import Sequence

MOST_BLOCKS = 65_536  # about 15 MB


class Branching:
    """Of the blocks that prompts parted behind most recently."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def parted(self, block_hashes: Sequence[bytes], known_blocks: int) -> None:
        """A prompt was placed of which so many blocks, from its beginning, were known."""
        if not 0 < known_blocks <= len(block_hashes):
            return
        last = block_hashes[known_blocks - 1]
        self._counts[last] = self._counts.get(last, 0) + 1
        self._counts.move_to_end(last)
        if len(self._counts) > self._most_blocks:
            self._counts.popitem(last=False)

    def behind(self, block_hashes: Sequence[bytes], known_blocks: int) -> int:
        """How many parted there before."""
        return self._counts.get(block_hashes[known_blocks - 1], 0) if 0 < known_blocks <= len(block_hashes) else 0
