"""The sequences of a scheduler: which run, which wait, which blocks each holds, and how that changes.

Pure. A sequence waits (without blocks, perhaps with its KV in host memory), runs, or is reserved: its prompt's KV is
being copied into its blocks.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.block_table import BlockTable
from baton.engine.kv_cache.swap_space import SwapSpace
from baton.engine.plan import BlockCopy, BlockSwap
from baton.engine.request import Request, blocks_for
from baton.engine.scheduler.overtaking import is_coming
from baton.engine.scheduler.sequences import (
    ArrivalKey,
    ArrivalOrder,
    ScheduledSequence,
    SchedulerCounters,
    StepsInFlight,
    Swapped,
)
from baton.generation.block_hash import HashChain


class Write(NamedTuple):
    """KV of one token."""

    table: BlockTable
    position: int


def wanted_blocks(running: Iterable[ScheduledSequence], pool: BlockPool, block_tokens: int) -> int:
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


def unfilled_slots(running: Iterable[ScheduledSequence], block_tokens: int) -> int:
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


SEQUENCES_PER_RESERVED_BLOCK = 2
"""Admission leaves one block for so many running sequences to grow into: it must not preempt what it just admitted.

Simulated on a full pool of 256 blocks, without swapping: with 1, 2, 4 the batch makes 19.8, 20.3, 20.5 tokens a step,
and 2, 7, 15 % of all tokens computed are computed again.
"""


class RunningBatch:
    """Every sequence is in one phase; `swap` is where the KV of preempted ones may wait."""

    def __init__(self, pool: BlockPool, block_tokens: int, swap: SwapSpace) -> None:
        self.pool = pool
        self.counters = SchedulerCounters()
        self.in_flight = StepsInFlight()
        self.waiting: ArrivalOrder[ScheduledSequence] = ArrivalOrder()
        self.running: ArrivalOrder[ScheduledSequence] = ArrivalOrder()
        self.reserved: dict[int, ScheduledSequence] = {}  # by request
        self.requests: dict[int, dict[int, ScheduledSequence]] = {}  # by request and choice, in any phase
        self._block_tokens = block_tokens
        self._swap = swap
        self._arrivals = 0

    @property
    def available_blocks(self) -> int:
        counts = self.pool.counts
        return counts.free + counts.cached

    @property
    def claimed_blocks(self) -> int:
        """Blocks that waiting sequences need at once, as if none of them were cached."""
        return sum(blocks_for(len(sequence.token_ids), self._block_tokens) for sequence in self.waiting)

    @property
    def claimed_slots(self) -> int:
        return sum(sequence.choices for sequence in self.waiting)

    @property
    def running_slots(self) -> int:
        """Places in the batch that are taken: a prompt takes one for each of its choices."""
        return sum(sequence.choices for sequence in self.running)

    @property
    def used_slots(self) -> int:
        """Places that are taken or reserved."""
        return self.running_slots + sum(sequence.choices for sequence in self.reserved.values())

    @property
    def pending_tokens(self) -> int:
        """Tokens to compute before the next one is drawn; all tokens of waiting ones, since hits are not known yet."""
        running = sum(sequence.uncomputed_tokens for sequence in self.running if sequence.uncomputed_tokens > 1)
        return running + sum(len(sequence.token_ids) for sequence in self.waiting)

    @property
    def held_by_sequences(self) -> int:
        """Blocks of running sequences, alone or together with reservations."""
        return self.pool.counts.held - self.held_by_transfers

    @property
    def held_by_transfers(self) -> int:
        """Blocks that only reservations hold."""
        if not self.reserved:
            return 0
        return self.pool.held_only_by(sequence.held().blocks for sequence in self.reserved.values())

    @property
    def unfilled_slots(self) -> int:
        """Token slots of running sequences' blocks that have no KV yet: internal fragmentation."""
        return unfilled_slots(self.running, self._block_tokens)

    def blocks_at_once(self, sequences: int, blocks: int) -> int:
        """Blocks that so many sequences of `blocks` each take where the last is to be admitted beside the others."""
        return sequences * blocks + headroom_blocks(sequences - 1)

    def make(self, request: Request, cache_root: bytes | None) -> ScheduledSequence:
        """The newest sequence, in no phase yet."""
        root = cache_root or (request.block_hashes[-1] if request.block_hashes else None)
        hashes = None if root is None else HashChain(root, self._block_tokens, request.block_hashes)
        turn = ArrivalKey(self._arrivals, request.first_choice)
        self._arrivals += 1
        return ScheduledSequence(request, turn, list(request.token_ids), hashes, request.params.places)

    def wait(self, sequence: ScheduledSequence) -> None:
        self.waiting.add(sequence)
        self.pool.touch(sequence.reusable_hashes(self._block_tokens))  # others are evicted before those
        self.requests.setdefault(sequence.request.request_id, {})[sequence.arrival_key.choice] = sequence

    def reserve(self, sequence: ScheduledSequence, blocks: int) -> bool:
        """Gives a sequence that was just made blocks for its prompt to land in. False: not enough, nothing is taken."""
        if not self._hold(sequence, blocks, beside=self.claimed_blocks):
            return False
        self.reserved[sequence.request.request_id] = sequence
        self.requests[sequence.request.request_id] = {sequence.arrival_key.choice: sequence}
        return True

    def land(self, sequence: ScheduledSequence) -> list[ScheduledSequence]:
        """The KV of a reserved prompt has come: its choices run. Returns them in order."""
        del self.reserved[sequence.request.request_id]
        self.running.add(sequence)
        sequence.computed_tokens = len(sequence.token_ids)
        return self.split(sequence)

    def keep_landed(self, sequence: ScheduledSequence, blocks: int) -> None:
        """Of a reserved prompt that will not land: the KV of its first so many blocks has come all the same."""
        landed_tokens = min(blocks * self._block_tokens, len(sequence.token_ids))
        sequence.computed_tokens = max(sequence.computed_tokens, landed_tokens)
        sequence.publish(self._block_tokens)

    def is_coming(self, sequence: ScheduledSequence) -> bool:
        """Whether a running prompt is about to publish the first block that the cache lacks of a waiting sequence."""
        hashes = sequence.reusable_hashes(self._block_tokens)
        return is_coming(self.pool, hashes, lambda *block: any(other.makes(*block) for other in self.running))

    def admit(self, sequence: ScheduledSequence, most_slots: int) -> list[BlockSwap] | None:
        """Lets a waiting sequence run. Returns the swaps back from host memory; None: no room, nothing is taken."""
        if self.used_slots + sequence.choices > most_slots:
            return None
        if not self._hold(sequence, blocks_for(len(sequence.token_ids), self._block_tokens), beside=0):
            return None
        swaps = self._swap_in(sequence)
        self.counters.recomputed_tokens += max(0, sequence.lost_tokens - sequence.computed_tokens)
        sequence.lost_tokens = 0
        self.waiting.remove(sequence)
        self.running.add(sequence)
        return swaps

    def preempt(self, sequence: ScheduledSequence) -> list[BlockSwap]:
        """Makes a running sequence wait. Returns the swaps to host memory, due before its blocks are written again."""
        # The newest token is computed again where that was done: the logits after it are needed.
        lost_tokens = min(sequence.computed_tokens, len(sequence.token_ids) - 1)
        self.counters.preemptions += 1
        self.counters.preempted_tokens += lost_tokens
        blocks = sequence.held().blocks[: blocks_for(lost_tokens, self._block_tokens)]
        slots = self._swap.take(len(blocks))
        sequence.release()
        sequence.lost_tokens = lost_tokens
        self.running.remove(sequence)
        self.waiting.add(sequence)
        if slots is None:
            return []
        sequence.swapped = Swapped(slots, lost_tokens)
        return [BlockSwap(block, slot) for block, slot in zip(blocks, slots.slots, strict=True)]

    def split(self, prompt: ScheduledSequence) -> list[ScheduledSequence]:
        """Publishes a prompt that runs and is computed, and makes one sequence of each of its choices; in order."""
        prompt.publish(self._block_tokens)
        first, draws = prompt.arrival_key.choice, prompt.first_draws
        others = [prompt.fork(choice, self._block_tokens) for choice in range(first + 1, first + draws)]
        prompt.choices = 1
        for other in others:
            self.running.add(other)
            self.requests[prompt.request.request_id][other.arrival_key.choice] = other
        return [prompt, *others]

    def branch(self, beams: Sequence[ScheduledSequence], parents: Sequence[int]) -> list[ScheduledSequence]:
        """One sequence for each of `parents`, indexes into `beams`: the first one of a parent is that one itself.

        Beams without any are ended. All of them are computed to their end.
        """
        for index, beam in enumerate(beams):
            if index not in parents:
                self.end(beam)
        children: list[ScheduledSequence] = []
        for place, parent in enumerate(parents):
            beam = beams[parent]
            children.append(beam if parent not in parents[:place] else self._fork(beam))
        return children

    def end(self, sequence: ScheduledSequence) -> None:
        """Forgets a sequence in any phase and gives back its blocks."""
        request_id = sequence.request.request_id
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            del self.reserved[request_id]
        self.in_flight.end(sequence)
        choices = self.requests[request_id]
        del choices[sequence.arrival_key.choice]
        if not choices:
            del self.requests[request_id]

    def _hold(self, sequence: ScheduledSequence, blocks: int, beside: int) -> bool:
        """Gives a sequence its first table: cached blocks, then fresh ones. `beside` so many stay available."""
        cached = self.pool.lookup(sequence.reusable_hashes(self._block_tokens))
        table = BlockTable(self.pool, cached)
        if blocks - len(cached) + self._headroom_blocks + beside > self.available_blocks:
            table.release()
            return False
        table.append(blocks - len(cached))
        sequence.table = table
        sequence.published_blocks = len(cached)
        sequence.computed_tokens = len(cached) * self._block_tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed_tokens
            if sequence.hashes is not None:
                self.counters.cache_query_tokens += len(sequence.token_ids)
                self.counters.cache_hit_tokens += sequence.computed_tokens
        return True

    def _fork(self, beam: ScheduledSequence) -> ScheduledSequence:
        """Another sequence under the least choice that is free."""
        choices = self.requests[beam.request.request_id]
        other = beam.fork(next(number for number in count() if number not in choices), self._block_tokens)
        choices[other.arrival_key.choice] = other
        self.running.add(other)
        return other

    @property
    def _headroom_blocks(self) -> int:
        return headroom_blocks(len(self.running) + len(self.reserved))

    def _swap_in(self, sequence: ScheduledSequence) -> list[BlockSwap]:
        """Cached blocks need not be brought back. The slots are free at once: none is taken before the next plan."""
        swapped, sequence.swapped = sequence.swapped, None
        if swapped is None:
            return []
        first = sequence.computed_tokens // self._block_tokens
        pairs = zip(sequence.held().blocks, swapped.slots.slots, strict=False)
        swaps = [BlockSwap(block, slot) for block, slot in pairs][first:]
        swapped.slots.release()
        self.counters.swapped_tokens += max(0, swapped.tokens - sequence.computed_tokens)
        sequence.computed_tokens = max(swapped.tokens, sequence.computed_tokens)
        return swaps


def headroom_blocks(sequences: int) -> int:
    return -(-sequences // SEQUENCES_PER_RESERVED_BLOCK)
