"""Which blocks a sequence needs where its model's layers lie in several groups of blocks, their names and charge. Pure.

Where some layers see all tokens and others only a window, their KV lies in blocks apart, and a block that a window has
passed is given back. Some tokens of a sequence, a column of its block table, take a block of each group. All blocks of
a pool have one size, so that one free list serves all.

The idea: vLLM's hybrid KV cache manager, and Jenga (arXiv:2503.18292).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple


class BlockLink(NamedTuple):
    """The name of a block, and that of the one without which it is of no use."""

    name: bytes
    parent: bytes | None  # None: of a prompt's first block


@dataclass(frozen=True, slots=True)
class BlockGroups:
    """So many groups keep the blocks of all tokens, and so many others those of a window. In this order."""

    whole: int = 1
    windowed: int = 0
    window_tokens: int = 0  # that a query sees, itself included; of all windowed groups
    block_tokens: int = 0  # of a column; with windowed groups

    @property
    def count(self) -> int:
        return self.whole + self.windowed

    def first_live(self, tokens: int) -> int:
        """The first column that windows still read once so many tokens are computed, the last one of them again too."""
        return max(0, tokens - self.window_tokens) // self.block_tokens if self.windowed else 0

    def first_live_behind(self, columns: int) -> int:
        """As `first_live`, of complete columns."""
        return self.first_live(columns * self.block_tokens)

    def blocks(self, columns: int, first_live: int = 0) -> int:
        """Of so many columns, those that are needed."""
        return self.whole * columns + self.windowed * max(0, columns - first_live)

    def complete_columns(self, blocks: int, first_live: int) -> int:
        """Columns whose needed blocks are all among the first so many, column after column."""
        if blocks <= self.whole * first_live:
            return blocks // self.whole
        return first_live + (blocks - self.whole * first_live) // self.count

    def name(self, block_hash: bytes, group: int) -> bytes:
        """Of a group's block of the column that has this hash."""
        return bytes((block_hash[0] ^ group,)) + block_hash[1:] if group else block_hash

    def column_links(self, block_hash: bytes, parent_hash: bytes | None) -> Iterator[BlockLink]:
        """Of one column, group after group. Whole groups are a chain, windowed ones hang on its end."""
        parent = None if parent_hash is None else self.name(parent_hash, self.whole - 1)
        for group in range(self.count):
            name = self.name(block_hash, group)
            yield BlockLink(name, parent)
            if group < self.whole:
                parent = name

    def links(self, hashes: Sequence[bytes]) -> list[BlockLink]:
        """Of all blocks that a sequence needs to go on behind these columns. The windows' come first: the others are of
        no use without them, and not the other way round.
        """
        first, parents = self.first_live_behind(len(hashes)), (None, *hashes)
        if self.count == 1:  # as mostly, and prompts are long
            return list(map(BlockLink, hashes, parents))
        columns = [list(self.column_links(*column)) for column in zip(hashes, parents, strict=False)]
        windows = [link for column in columns[first:] for link in column[self.whole :]]
        return windows + [link for column in columns for link in column[: self.whole]]

    def names(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Those of `links`."""
        if self.whole > 1:
            return [link.name for link in self.links(hashes)]
        live = hashes[self.first_live_behind(len(hashes)) :] if self.windowed else ()
        return [*(self.name(each, group) for each in live for group in range(1, self.count)), *hashes]

    def windowed_links(self, columns: int) -> int:
        """How many of `links` are windows'."""
        return self.windowed * (columns - self.first_live_behind(columns))

    def chain_of(self, names: Sequence[bytes]) -> Sequence[bytes]:
        """The hashes of the columns whose `links` have these names, in this order; none where there are no such."""
        most = len(names) // self.whole
        columns = next((c for c in range(most + 1) if self.blocks(c, self.first_live_behind(c)) == len(names)), 0)
        return names[self.windowed_links(columns) :: self.whole][:columns]

    def known_columns(
        self, hashes: Sequence[bytes], has: Callable[[bytes], bool], first_live: int | None = None
    ) -> int:
        """The longest prefix of `hashes` of which all needed blocks are had.

        `first_live`: windows need their blocks from this column on, however long the prefix is; None: as of a sequence
        that goes on behind the prefix.
        """

        def has_whole(block_hash: bytes) -> bool:
            return all(has(self.name(block_hash, group)) for group in range(self.whole))

        def has_windows(block_hash: bytes) -> bool:
            return all(has(self.name(block_hash, group)) for group in range(self.whole, self.count))

        columns = sum(1 for _ in takewhile(has if self.whole == 1 else has_whole, hashes))
        if not self.windowed:
            return columns
        if first_live is not None:
            live = hashes[first_live:columns]
            return columns if not live else first_live + sum(1 for _ in takewhile(has_windows, live))
        while columns:
            first = self.first_live_behind(columns)
            lacking = next((c for c in reversed(range(first, columns)) if not has_windows(hashes[c])), None)
            if lacking is None:
                break
            columns = lacking  # every prefix between would need that column
        return columns


ONE_GROUP = BlockGroups()

CHARGED_ANSWER_TOKENS = 256
"""An answer counts with at most so many tokens; a decode worker preempts where it grows beyond.

Most answers end long before max_tokens, which is the whole context where a client leaves it out: charged in full, a
pool would stand nearly empty.
"""


def charged_blocks(
    prompt_tokens: int, max_tokens: int, choices: int, block_tokens: int, groups: BlockGroups = ONE_GROUP
) -> int:
    """The charge of a request on a decode worker: one rule for the router that charges and the worker that lends.

    Complete blocks of the prompt once, and for each choice the blocks that an answer of the charged length adds;
    without those that windows have passed by its end.
    """
    end_tokens = prompt_tokens + min(max_tokens, CHARGED_ANSWER_TOKENS)
    first_live = groups.first_live(end_tokens)
    shared = groups.blocks(prompt_tokens // block_tokens, first_live)
    each = groups.blocks(-(-end_tokens // block_tokens), first_live)
    return shared + choices * (each - shared)
