"""Counts and names of the blocks of a sequence, for models with several groups of layers. Pure.

Layers that attend to all tokens and layers that attend only to a window are in groups with separate KV blocks. A block
of a windowed group is released once all its tokens are before the window. A column of a block table covers
`block_tokens` tokens and has one block per group. All blocks of a pool have the same size, so all groups share one free
list.

The design follows vLLM's hybrid KV cache manager and Jenga (arXiv:2503.18292).
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple


class BlockLink(NamedTuple):
    """Names of a block and of its parent. Without its parent, a cached block is useless."""

    name: bytes
    parent: bytes | None  # None for a prompt's first block


@dataclass(frozen=True, slots=True)
class BlockGroups:
    """Numbers of layer groups: `whole` groups keep the blocks of all tokens, `windowed` groups those of a window.

    Whole groups have the first group numbers, from 0; windowed groups follow. At least one of both is not 0.
    """

    whole: int = 1
    windowed: int = 0
    window_tokens: int = 0  # tokens that a query attends to, itself included
    block_tokens: int = 0  # tokens per column; set only with windowed groups

    @property
    def count(self) -> int:
        return self.whole + self.windowed

    def first_live(self, tokens: int) -> int:
        """Return the window's first column after `tokens` computed tokens, even if the last token is recomputed."""
        return max(0, tokens - self.window_tokens) // self.block_tokens if self.windowed else 0

    def first_live_behind(self, columns: int) -> int:
        """Return the window's first column after `columns` complete columns."""
        return self.first_live(columns * self.block_tokens)

    def blocks(self, columns: int, first_live: int = 0) -> int:
        """Return the number of blocks that `columns` columns need. `first_live`: first column in the window."""
        return self.whole * columns + self.windowed * max(0, columns - first_live)

    @property
    def window_columns(self) -> int:
        """Maximum number of columns of windowed groups that a sequence needs while it grows column by column."""
        return -(-self.window_tokens // self.block_tokens) + 2 if self.windowed else 0

    def most_blocks(self, columns: int, first_live: int = 0) -> int:
        """Return the number of blocks that `columns` columns need if they are computed one by one.

        Blocks that the window has passed are then released in time. `first_live`: first column in the window now.
        """
        return self.whole * columns + self.windowed * min(max(0, columns - first_live), self.window_columns)

    def most_columns(self, blocks: int) -> int:
        """Return the number of columns of the longest sequence for which `blocks` blocks suffice: see `most_blocks`."""
        if blocks < self.count * self.window_columns or not self.windowed:
            return blocks // self.count
        if not self.whole:
            return sys.maxsize
        return (blocks - self.windowed * self.window_columns) // self.whole

    def complete_columns(self, blocks: int, first_live: int) -> int:
        """Return the number of leading columns for which `blocks` blocks suffice. `first_live`: as for `blocks`."""
        if blocks <= self.whole * first_live:
            return blocks // self.whole if self.whole else 0
        return first_live + (blocks - self.whole * first_live) // self.count

    def name(self, block_hash: bytes, group: int) -> bytes:
        """Return the name of the block of group number `group` in the column with hash `block_hash`."""
        return bytes((block_hash[0] ^ group,)) + block_hash[1:] if group else block_hash

    def column_links(self, block_hash: bytes, parent_hash: bytes | None) -> Iterator[BlockLink]:
        """Yield name and parent of each block in one column, in the order of groups.

        Blocks of whole groups form a chain. The last block of the chain is the parent of all windowed groups' blocks;
        without a chain, these have no parent.
        """
        parent = None if parent_hash is None or not self.whole else self.name(parent_hash, self.whole - 1)
        for group in range(self.count):
            name = self.name(block_hash, group)
            yield BlockLink(name, parent)
            if group < self.whole:
                parent = name

    def links(self, hashes: Sequence[bytes]) -> list[BlockLink]:
        """Return name and parent of each block that a sequence needs to continue after these columns.

        Blocks of windowed groups come first: blocks of whole groups are useless without them, but not vice versa.
        """
        first, parents = self.first_live_behind(len(hashes)), (None, *hashes)
        if self.count == self.whole == 1:  # fast path of the usual case
            return list(map(BlockLink, hashes, parents))
        columns = [list(self.column_links(*column)) for column in zip(hashes, parents, strict=False)]
        windows = [link for column in columns[first:] for link in column[self.whole :]]
        return windows + [link for column in columns for link in column[: self.whole]]

    def names(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Return the names of the blocks in `links`."""
        if self.whole != 1:
            return [link.name for link in self.links(hashes)]
        live = hashes[self.first_live_behind(len(hashes)) :] if self.windowed else ()
        return [*(self.name(each, group) for each in live for group in range(1, self.count)), *hashes]

    def windowed_links(self, columns: int) -> int:
        """Return the number of blocks of windowed groups in `links`."""
        return self.windowed * (columns - self.first_live_behind(columns))

    def chain_of(self, names: Sequence[bytes]) -> Sequence[bytes]:
        """Return the column hashes for which `names` returns these names; empty if there are none, or some unnamed."""
        if not self.whole:
            return ()
        most = len(names) // self.whole
        columns = next((c for c in range(most + 1) if self.blocks(c, self.first_live_behind(c)) == len(names)), 0)
        return names[self.windowed_links(columns) :: self.whole][:columns]

    def known_columns(
        self, hashes: Sequence[bytes], has: Callable[[bytes], bool], first_live: int | None = None
    ) -> int:
        """Return the length of the longest prefix of `hashes` whose needed blocks are all known.

        `first_live`: first column in which blocks of windowed groups are needed; None: the first column of the window
        of a sequence that continues after the prefix.
        """

        def has_whole(block_hash: bytes) -> bool:
            return all(has(self.name(block_hash, group)) for group in range(self.whole))

        def has_windows(block_hash: bytes) -> bool:
            return all(has(self.name(block_hash, group)) for group in range(self.whole, self.count))

        columns = len(hashes)
        if self.whole:
            columns = sum(1 for _ in takewhile(has if self.whole == 1 else has_whole, hashes))
        if not self.windowed:
            return columns
        if first_live is not None:
            live = hashes[first_live:columns]
            known = sum(1 for _ in takewhile(has_windows, live))
            if not self.whole and not known:
                return 0  # nothing is cached: blocks before the window are merely not needed
            return columns if not live else first_live + known
        while columns:
            # From the first column, so that a model without whole groups skips a window at a time if none is known.
            window = range(self.first_live_behind(columns), columns)
            lacking = next((c for c in window if not has_windows(hashes[c])), None)
            if lacking is None:
                break
            columns = lacking  # every prefix between needs this column too
        return columns


ONE_GROUP = BlockGroups()

CHARGED_ANSWER_TOKENS = 256
"""Maximum answer length that is charged; a decode worker preempts if answers grow longer.

Most answers are far shorter than max_tokens, whose default is the complete context: charging it would leave the pool
almost empty.
"""


def charged_blocks(
    prompt_tokens: int, max_tokens: int, choices: int, block_tokens: int, groups: BlockGroups = ONE_GROUP
) -> int:
    """Return the number of blocks that a request is charged on a decode worker. Router and workers use this function.

    Complete blocks of the prompt count once. All other blocks, up to the end of the charged answer, count once per
    choice. Blocks of windowed groups before the window do not count.
    """
    end_tokens = prompt_tokens + min(max_tokens, CHARGED_ANSWER_TOKENS)
    first_live = groups.first_live(end_tokens)
    shared = groups.blocks(prompt_tokens // block_tokens, first_live)
    each = groups.blocks(-(-end_tokens // block_tokens), first_live)
    return shared + choices * (each - shared)
