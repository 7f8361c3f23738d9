"""Number of prompts that share a known prefix and then differ. Pure state."""

from collections import OrderedDict
from collections.abc import Sequence

MOST_BLOCKS = 131_072  # maximum number of recorded blocks, about 30 MB
END_BLOCKS = 2  # number of last blocks recorded per prompt: the conversation's next turn may change the last one
MIDWAY = 4
"""Assumed number of prompts that diverge behind an unrecorded prefix: such a prefix ends inside longer prompts."""


class PrefixFanOut:
    """Number of prompts that diverged behind each known prefix.

    A conversation's prompt is continued only by the conversation's next turn. A system prompt or a document is
    continued by many different prompts: a second worker that computes this prefix can serve all later prompts.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._counts: OrderedDict[bytes, int] = OrderedDict()  # diverging prompts, by hash of a prefix's last block

    def placed(self, block_hashes: Sequence[bytes], known_blocks: int) -> None:
        """Record a placed prompt, whose first `known_blocks` blocks were cached."""
        if 0 < known_blocks <= len(block_hashes):
            last = block_hashes[known_blocks - 1]
            self._counts[last] = self._counts.get(last, MIDWAY) + 1
            self._counts.move_to_end(last)
        self.ended(block_hashes)

    def ended(self, block_hashes: Sequence[bytes]) -> None:
        """Record the last blocks of a prompt, or of a prompt with its answer."""
        for block_hash in block_hashes[-END_BLOCKS:]:
            self._counts.setdefault(block_hash, 0)
        while len(self._counts) > self._most_blocks:
            self._counts.popitem(last=False)

    def behind(self, block_hashes: Sequence[bytes], known_blocks: int) -> int:
        """Return the number of prompts that diverged behind the first `known_blocks` blocks; 0 without known blocks."""
        return self._counts.get(block_hashes[known_blocks - 1], MIDWAY) if 0 < known_blocks <= len(block_hashes) else 0
