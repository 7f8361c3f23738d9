"""One line of the allocator or the scheduler changed: the checks of SchedulerWorld notice it.

A mutation whose line is gone fails: it is to be moved to what has taken the place of that line.
"""

import random
from typing import Any

import pytest

from baton.text.block_groups import ONE_GROUP, BlockGroups
from tests.fixtures.mutants import Mutation, world_with
from tests.fixtures.scheduler_walk import walk
from tests.fixtures.scheduler_world import BLOCK

WORLDS = 80
WINDOWED = BlockGroups(1, 2, 3, BLOCK)
POOL, TABLE, SWAP = "kv_cache.block_pool", "kv_cache.block_table", "kv_cache.swap_space"
SEQUENCES, BATCH, SCHEDULER = "scheduler.sequences", "scheduler.batch", "scheduler.scheduler"
MUTATIONS = [
    Mutation(POOL, "if count > available:", "if count > available + 1:"),
    Mutation(POOL, "self._references[block] = 1", "self._references[block] = 2"),
    Mutation(POOL, "self._require_held(block)\n        self._references[block] += 1", "pass"),
    Mutation(POOL, "if self._references[block] > 0:", "if self._references[block] > 1:"),
    Mutation(POOL, "if block_hash in self._by_hash or", "if block in self._published or"),
    Mutation(POOL, "== 0:\n                del self._cached", "== 1:\n                del self._cached"),
    Mutation(POOL, "self._references[block] += 1\n            blocks.append", "blocks.append"),
    Mutation(POOL, "del self._by_hash[block_hash]", "pass"),
    Mutation(POOL, "self._children[parent_hash] -= 1", "self._children[parent_hash] -= 2"),
    Mutation(TABLE, "(*held, *fresh)", "(*held[:-1], *fresh)"),
    Mutation(TABLE, "self._pool.share(block)", "pass"),
    Mutation(TABLE, "self.blocks[: columns * self", "self.blocks[: (columns - 1) * self"),
    Mutation(TABLE, "references(held[place]) > 1]", "references(held[place]) > 2]"),
    Mutation(
        TABLE,
        "            self._pool.release(blocks[place])\n            blocks[place] = dest",
        "            blocks[place] = dest",
    ),
    Mutation(TABLE, "BlockCopy(blocks[place], destination)", "BlockCopy(destination, blocks[place])"),
    Mutation(TABLE, "reversed(blocks):\n            self._pool", "reversed(blocks[1:]):\n            self._pool"),
    Mutation(TABLE, "zip(self.held(column, column + 1), links", "zip(self.held(column + 1, column + 2), links"),
    Mutation(TABLE, "first = max(first_live, self._first_live)", "first = first_live"),
    Mutation(TABLE, "self._pool.release(blocks[place])\n                blocks", "blocks"),
    Mutation(TABLE, "self._first_live = column", "pass"),
    Mutation(TABLE, "groups.count if column >= first else groups.whole", "groups.whole"),
    Mutation(TABLE, "groups.first_live_behind(cached) if", "groups.first_live_behind(cached + 2) if"),
    Mutation(SEQUENCES, "groups.first_live(self.computed_tokens)", "groups.first_live(self.computed_tokens + 2)"),
    Mutation(SWAP, "if count > len(self._free):", "if count > len(self._free) + 1:"),
    Mutation(SEQUENCES, "(len(self.token_ids) - 1) // block_tokens", "len(self.token_ids) // block_tokens"),
    Mutation(SEQUENCES, "self.swapped.slots.release()", "pass"),
    Mutation(
        SEQUENCES, "self.prompt_tokens = self.request.prompt_tokens", "self.prompt_tokens = len(self.request.token_ids)"
    ),
    Mutation(BATCH, "new += pool.groups.count", "new += pool.groups.count - 1"),
    Mutation(BATCH, "rest = 0", "rest = rest"),
    Mutation(TABLE, "return self.make_writable(column)", "return []"),
    Mutation(
        "scheduler.sequences",
        "if self._writes(sequence):\n            self._ended",
        "if False:\n            self._ended",
    ),
    Mutation(SEQUENCES, "if sequence not in kept:", "if sequence in kept:"),
    Mutation(SCHEDULER, "each.computed_tokens + (id(each) in place)", "each.computed_tokens"),
    Mutation(SCHEDULER, "pool, block_tokens) > pool", "pool, block_tokens) > 1 + pool"),
    Mutation(SEQUENCES, "if not start % block_tokens:", "if start % block_tokens == 1:"),
    Mutation(BATCH, "slots[skipped:]", "slots[: len(blocks)]"),
    Mutation(BATCH, "swapped.slots.release()", "pass"),
    Mutation(BATCH, "computed_tokens = swapped.tokens", "computed_tokens = swapped.tokens + 1"),
    Mutation(BATCH, "computed_tokens = acquired.cached_columns *", "computed_tokens = (acquired.cached_columns + 1) *"),
    Mutation(BATCH, "self.waiting.add(sequence)\n        if slots is None:", "if slots is None:"),
    Mutation(SEQUENCES, "tuple(self.copies)", "()"),
    Mutation(SEQUENCES, "tuple(self.swaps_out)", "()"),
    Mutation(SEQUENCES, "tuple(self.swaps_in)", "()"),
    Mutation(SCHEDULER, "return wanted > pool.available", "return wanted > pool.available + 1"),
    Mutation(SCHEDULER, "self._stalled = draft.oldest_short", "self._stalled = None"),
    Mutation(BATCH, "blocks_for(end, size) - table", "blocks_for(len(prompt.token_ids), size) - table"),
    Mutation(
        BATCH,
        "first_live(each.computed_tokens))\n        return",
        "first_live(each.computed_tokens + 2))\n        return",
    ),
    Mutation(SCHEDULER, "self.batch.pin(sequence)", "self.batch.end(sequence)"),
    Mutation(SEQUENCES, "self.uncomputed_tokens == 1 and not self.request.prefill_only", "self.uncomputed_tokens == 1"),
    Mutation(SEQUENCES, "table.held(self.readable_blocks, readable", "table.held(0, readable"),
    Mutation(BATCH, "chain(self.reserved.values(), self.pinned.values())", "self.reserved.values()"),
    Mutation(SCHEDULER, "sequence.table is None or sequence in ended", "not chunk.samples"),
]


def explore(world_of: Any) -> None:
    """The same operations each time, on pools of 3 to 8 columns, with and without host memory and windows."""
    for seed in range(WORLDS):
        groups = WINDOWED if seed % 2 else ONE_GROUP
        blocks, host_slots = groups.blocks(3 + seed // 2 % 6), groups.blocks((0, 12, 3)[seed // 2 % 3])
        options = {"hurried": seed % 4 > 1, "answer_tokens": (256, 0)[seed % 4 > 1], "speculates": seed % 8 > 5}
        world = world_of(blocks=blocks, host_slots=host_slots, groups=groups, **options)
        walk(world, random.Random(seed), operations=60, longest=16 if seed % 4 > 1 else 9)
        world.finish()


def test_unchanged_nothing_is_found() -> None:
    explore(world_with(None))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_changed_line_is_found(mutation: Mutation) -> None:
    changed = world_with(mutation)  # a mutation without its line fails here
    with pytest.raises(Exception):  # noqa: B017 -- whichever check sees it first
        explore(changed)


@pytest.mark.parametrize("old", ["no such line", "self._references[block]"])
def test_mutation_without_a_unique_line_is_rejected(old: str) -> None:
    with pytest.raises(LookupError, match=r"engine\.kv_cache\.block_pool has .* [02-9] times instead of once"):
        world_with(Mutation(POOL, old, "pass"))
