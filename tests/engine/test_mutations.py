"""One line of the allocator or the scheduler changed: the checks of MixedWorld notice it.

A mutation whose line is gone fails: it is to be moved to what has taken the place of that line.
"""

import random
from typing import Any

import pytest

from tests.fixtures.mixed_walk import walk
from tests.fixtures.mutants import Mutation, world_with

WORLDS = 40
MUTATIONS = [
    Mutation("pages", "if count > available:", "if count > available + 1:"),
    Mutation("pages", "self._references[block] = 1", "self._references[block] = 2"),
    Mutation("pages", "self._require_held(block)\n        self._references[block] += 1", "pass"),
    Mutation("pages", "if self._references[block] > 0:", "if self._references[block] > 1:"),
    Mutation("pages", "if block_hash in self._by_hash or", "if block in self._published or"),
    Mutation("pages", "== 0:\n                del self._cached", "== 1:\n                del self._cached"),
    Mutation("pages", "self._references[block] += 1\n            blocks.append", "blocks.append"),
    Mutation("pages", "del self._by_hash[block_hash]", "pass"),
    Mutation("pages", "self._children[parent_hash] -= 1", "self._children[parent_hash] -= 2"),
    Mutation("block_table", "(*self.blocks, *self._pool", "(*self.blocks[:-1], *self._pool"),
    Mutation("block_table", "self._pool.share(block)", "pass"),
    Mutation("block_table", "shared = self.blocks[:count]", "shared = self.blocks[: count - 1]"),
    Mutation("block_table", "if self._pool.references(source) == 1:", "if self._pool.references(source) <= 2:"),
    Mutation("block_table", "self._pool.release(source)", "pass"),
    Mutation("block_table", "return BlockCopy(source, destination)", "return BlockCopy(destination, source)"),
    Mutation("block_table", "for block in reversed(blocks):", "for block in reversed(blocks[1:]):"),
    Mutation("block_table", "zip(self.blocks, hashes", "zip(self.blocks[1:], hashes"),
    Mutation("swap_space", "if count > len(self._free):", "if count > len(self._free) + 1:"),
    Mutation("mixed_state", "(len(self.token_ids) - 1) // block_tokens", "len(self.token_ids) // block_tokens"),
    Mutation("mixed_state", "self.swapped.slots.release()", "pass"),
    Mutation("mixed_state", "- self.request.prompt_tokens", "- len(self.request.token_ids)"),
    Mutation("mixed_growth", "new += 1", "new += 0"),
    Mutation("mixed_growth", "rest = 0", "rest = rest"),
    Mutation("mixed_growth", "return table.make_writable(index)", "return None"),
    Mutation(
        "mixed_flight", "if self._writes(sequence):\n            self._ended", "if False:\n            self._ended"
    ),
    Mutation("mixed_flight", "if sequence not in kept:", "if sequence in kept:"),
    Mutation("mixed_ahead", "sequence.computed_tokens + is_under_way", "sequence.computed_tokens"),
    Mutation("mixed_ahead", "batch.pool, block_tokens) > batch", "batch.pool, block_tokens) > 1 + batch"),
    Mutation("mixed_batch", "][first:]", "][first + 1 :]"),
    Mutation("mixed_batch", "swapped.slots.release()", "pass"),
    Mutation("mixed_batch", "max(swapped.tokens, sequence.computed_tokens)", "swapped.tokens + 1"),
    Mutation("mixed_batch", "computed_tokens = len(cached) * self", "computed_tokens = (len(cached) + 1) * self"),
    Mutation("mixed_batch", "self.waiting.add(sequence)\n        if slots is None:", "if slots is None:"),
    Mutation("mixed_draft", "tuple(self.copies)", "()"),
    Mutation("mixed_draft", "tuple(self.swaps_out)", "()"),
    Mutation("mixed_draft", "tuple(self.swaps_in)", "()"),
    Mutation("mixed_scheduler", "self._block_tokens) > available", "self._block_tokens) > available + 1"),
    Mutation("mixed_scheduler", "sequence.table is None or sequence in flights.ended", "not chunk.samples"),
]


def explore(world_of: Any) -> None:
    """The same operations each time, on pools of 3 to 8 blocks, with and without host memory."""
    for seed in range(WORLDS):
        world = world_of(blocks=3 + seed % 6, host_slots=(0, 12, 3)[seed % 3])
        walk(world, random.Random(seed), operations=60)
        world.finish()


def test_unchanged_nothing_is_found() -> None:
    explore(world_with(None))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_changed_line_is_found(mutation: Mutation) -> None:
    changed = world_with(mutation)  # a mutation without its line fails here
    with pytest.raises(Exception):  # noqa: B017 -- whichever check sees it first
        explore(changed)


@pytest.mark.parametrize("old", ["no such line", "self._references[block]"])
def test_a_mutation_whose_line_does_not_stand_once_is_refused(old: str) -> None:
    with pytest.raises(LookupError, match=r"engine\.pages has .* [02-9] times instead of once"):
        world_with(Mutation("pages", old, "pass"))
