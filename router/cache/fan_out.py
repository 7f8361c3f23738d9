"""Count of the prompts that diverge behind a known prefix. Pure state."""

from collections import OrderedDict
from collections.abc import Sequence

MOST_BLOCKS = 131_072  # about 30 MB
END_BLOCKS = 2  # the last one may have been cut short, and differs then in the next turn
MIDWAY = 4
"""A prefix that ends inside of other prompts counts as one behind which so many prompts diverged."""


class PrefixFanOut:
    """Count of prompts that continued behind a known prefix: where the newest prompts diverge.

    The end of a prompt is continued by its conversation's next turn. A system prompt or a document is continued by many
    prompts, each in its own way: a worker that computes it again has its blocks for all later prompts.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._counts: OrderedDict[bytes, int] = OrderedDict()  # by block that was one of the last of a prompt

    def placed(self, block_hashes: Sequence[bytes], known_blocks: int) -> None:
        """A prompt was placed of which so many blocks, from its beginning, were known."""
        if 0 < known_blocks <= len(block_hashes):
            last = block_hashes[known_blocks - 1]
            self._counts[last] = self._counts.get(last, MIDWAY) + 1
            self._counts.move_to_end(last)
        self.ended(block_hashes)

    def ended(self, block_hashes: Sequence[bytes]) -> None:
        """A prompt, or an answer, ends there."""
        for block_hash in block_hashes[-END_BLOCKS:]:
            self._counts.setdefault(block_hash, 0)
        while len(self._counts) > self._most_blocks:
            self._counts.popitem(last=False)

    def behind(self, block_hashes: Sequence[bytes], known_blocks: int) -> int:
        """Return the number of prompts that diverged there before; 0 if the prompt is unknown."""
        return self._counts.get(block_hashes[known_blocks - 1], MIDWAY) if 0 < known_blocks <= len(block_hashes) else 0
