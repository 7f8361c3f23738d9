"""Blocks that running sequences come to need as their answers grow, and how full those are that they have. Pure."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from engine.block_table import BlockTable
from engine.mixed_state import MixedSequence
from engine.pages import BlockPool
from engine.plan import BlockCopy


class Write(NamedTuple):
    """KV of one token."""

    table: BlockTable
    position: int


def wanted_blocks(running: Iterable[MixedSequence], pool: BlockPool, block_tokens: int) -> int:
    """Blocks that one more token for each answer takes."""
    growing = (sequence for sequence in running if sequence.uncomputed_tokens == 1)
    return blocks_to_write((Write(each.held(), each.computed_tokens) for each in growing), pool, block_tokens)


def blocks_to_write(writes: Iterable[Write], pool: BlockPool, block_tokens: int) -> int:
    """New blocks, and copies of shared ones."""
    new, writers = 0, Counter[int]()
    for table, position in writes:
        blocks, index = table.blocks, position // block_tokens
        if index == len(blocks):
            new += 1
        else:
            writers[blocks[index]] += 1
    # The last writer of a block without other readers keeps it.
    return new + sum(min(count, pool.references(block) - 1) for block, count in writers.items())


def grow(table: BlockTable, position: int, block_tokens: int) -> BlockCopy | None:
    """Makes the block of `position` exist and be this table's alone; returns the copy to make before it is written.

    Raises: OutOfBlocks.
    """
    index = position // block_tokens
    if index == len(table.blocks):
        table.append(1)
    return table.make_writable(index)


def unfilled_slots(running: Iterable[MixedSequence], block_tokens: int) -> int:
    """Token slots of their blocks that have no KV yet: the PagedAttention paper's internal fragmentation.

    Looks only at the ends of tables, behind the KV that is written; a block that several share counts once.
    """
    filled: dict[int, int] = {}
    for sequence in running:
        complete, rest = divmod(sequence.computed_tokens, block_tokens)
        for block in sequence.held().blocks[complete:]:
            filled[block] = max(filled.get(block, 0), rest)
            rest = 0
    return len(filled) * block_tokens - sum(filled.values())
