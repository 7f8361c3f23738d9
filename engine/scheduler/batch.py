"""Sequences of a scheduler, their phases (waiting, running, reserved, pinned) and their KV blocks. Pure.

A waiting sequence has no blocks; its KV may be in host memory. A running prompt takes blocks chunk by chunk. A reserved
sequence has all its blocks, into which the KV of its prompt is being copied. A pinned sequence is a prompt computed for
another worker that has not read the blocks yet.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import NamedTuple

from baton.engine.kv_cache.block_pool import BlockPool, OutOfBlocks
from baton.engine.kv_cache.block_table import BlockTable, acquire
from baton.engine.kv_cache.named_blocks import NamedBlocks
from baton.engine.kv_cache.sessions import SessionTurn
from baton.engine.kv_cache.swap_space import SwapSpace
from baton.engine.request import BlockSwap, Request, blocks_for
from baton.engine.scheduler.sequences import (
    ArrivalKey,
    ArrivalOrder,
    ScheduledSequence,
    SchedulerCounters,
    StepsInFlight,
    Swapped,
)
from baton.text.block_hash import HashChain

LOOKAHEAD = 64  # maximum number of waiting prompts to skip per step; each costs a cache lookup


@dataclass(frozen=True, slots=True, eq=False)
class IncomingPrefix:
    """Blocks that a fetch is filling for the prefix cache. Close it once, for example with `end_fetch`."""

    named: NamedBlocks
    chain: tuple[bytes, ...]  # column hashes of a prompt, reusable once all blocks are filled
    known_columns: int  # number of columns that were reusable before the fetch

    @property
    def hashes(self) -> tuple[bytes, ...]:
        return self.named.names

    @property
    def blocks(self) -> tuple[int, ...]:
        return self.named.blocks

    @property
    def cached_blocks(self) -> int:
        """Number of leading blocks that were cached before the fetch."""
        return self.named.cached

    def new_columns(self, blocks: int) -> int:
        """Return the number of columns that became reusable when the first `blocks` blocks were filled.

        With windowed layer groups, columns become reusable only when all blocks are filled.
        """
        if len(self.blocks) != len(self.chain):
            return len(self.chain) - self.known_columns if blocks == len(self.blocks) else 0
        return max(0, blocks - self.known_columns)


class Write(NamedTuple):
    """Position of a token whose KV will be written."""

    table: BlockTable
    position: int


def wanted_blocks(running: Iterable[ScheduledSequence], pool: BlockPool, block_tokens: int) -> int:
    """Count the blocks needed to grow each running answer by one token."""
    growing = (sequence for sequence in running if sequence.is_answer)
    return blocks_to_write((Write(each.held(), each.computed_tokens) for each in growing), pool, block_tokens)


def blocks_to_write(writes: Iterable[Write], pool: BlockPool, block_tokens: int) -> int:
    """Count the blocks that these writes need: new blocks, and copies of shared blocks."""
    new, writers = 0, Counter[int]()
    for table, position in writes:
        index = position // block_tokens
        if index == table.columns:
            new += pool.groups.count
        else:
            writers.update(table.column(index))
    # If all owners of a shared block write, the last one writes in place and needs no copy.
    return new + sum(min(count, pool.references(block) - 1) for block, count in writers.items())


def unfilled_slots(running: Iterable[ScheduledSequence], block_tokens: int) -> int:
    """Count the token slots without KV in running sequences' blocks: PagedAttention's internal fragmentation.

    Inspects only blocks that are not full. A shared block counts once.
    """
    filled: dict[int, int] = {}
    for sequence in running:
        complete, rest = divmod(sequence.computed_tokens, block_tokens)
        table = sequence.held()
        count = table.groups.count
        for place, block in enumerate(table.blocks[complete * count :], start=-count):
            if place == 0:
                rest = 0  # behind the first column
            filled[block] = max(filled.get(block, 0), rest)
    return len(filled) * block_tokens - sum(filled.values())


SEQUENCES_PER_RESERVED_BLOCK = 2
"""Running sequences per block that admission leaves free for growth, so that it does not preempt what it just admitted.

Simulated on a full pool of 256 blocks without swapping: with 1, 2 and 4, a step generates 19.8, 20.3 and 20.5 tokens,
and 2, 7 and 15 % of all computed tokens are recomputed.
"""


class RunningBatch:
    """Sequences of a scheduler, each in one phase (see the module). Preemption swaps KV out to `swap`."""

    def __init__(
        self,
        pool: BlockPool,
        block_tokens: int,
        swap: SwapSpace,
        on_end: Callable[[ScheduledSequence], None] | None = None,
    ) -> None:
        """Start empty. `on_end` is called with each sequence that is removed."""
        self.pool = pool
        self.counters = SchedulerCounters()
        self.in_flight = StepsInFlight()
        self.waiting = ArrivalOrder()
        self.running = ArrivalOrder()
        self.reserved: dict[int, ScheduledSequence] = {}  # by request id: prompts whose KV is being received
        self.pinned: dict[int, ScheduledSequence] = {}  # by request id: prompts whose blocks await reading by a worker
        self._incoming: set[IncomingPrefix] = set()
        self.requests: dict[int, dict[int, ScheduledSequence]] = {}  # by request id and choice
        self._block_tokens = block_tokens
        self._swap = swap
        self._on_end = on_end
        self._arrivals = 0

    @property
    def holds_for_transfers(self) -> bool:
        """Return whether transfers use blocks. These become free soon, since each transfer finishes in bounded time."""
        return bool(self.reserved or self.pinned or self._incoming)

    @property
    def claimed_blocks(self) -> int:
        """Blocks that all waiting sequences need together, ignoring cache hits."""
        most_blocks = self.pool.groups.most_blocks
        return sum(most_blocks(blocks_for(len(each.token_ids), self._block_tokens)) for each in self.waiting)

    def outstanding_blocks(self, before: ArrivalKey | None = None, most_foreseen: int = sys.maxsize) -> int:
        """Blocks that running prompts will still take. `before`: count only prompts that arrived before this key.

        `most_foreseen`: maximum count for all preemptible prompts, which take blocks step by step. A `prefill_only`
        prompt takes none until all that it lacks are available.
        """
        prompts = [each for each in self.running if each.is_prompt and (before is None or each.arrival_key < before)]
        at_once = sum(self.lacking_blocks(each) for each in prompts if each.request.prefill_only)
        by_step = sum(self.lacking_blocks(each) for each in prompts if not each.request.prefill_only)
        return at_once + min(by_step, most_foreseen)

    def lacking_blocks(self, sequence: ScheduledSequence) -> int:
        """Blocks that a running sequence must still take to compute its tokens, after `relieve`.

        Blocks in its window become available for it once passed, except those that others hold, too.
        """
        table, groups = sequence.held(), self.pool.groups
        columns = blocks_for(len(sequence.token_ids), self._block_tokens)
        first_live = groups.first_live(sequence.computed_tokens)
        lacking = groups.most_blocks(columns, first_live) - groups.blocks(table.columns, first_live)
        if groups.windowed:
            lacking = min(lacking + table.shared_in_windows(first_live), groups.count * (columns - table.columns))
        return max(0, lacking)

    @property
    def claimed_slots(self) -> int:
        return sum(sequence.places for sequence in self.waiting)

    @property
    def running_sequences(self) -> int:
        """Number of running choices. A running prompt counts once per choice, a `prefill_only` prompt only once."""
        return sum([1 if each.request.prefill_only else each.choices for each in self.running])

    @property
    def used_slots(self) -> int:
        """Number of batch slots of running and reserved sequences. A prompt uses one slot per choice."""
        return sum(sequence.places for sequence in chain(self.running, self.reserved.values()))

    @property
    def pending_tokens(self) -> int:
        """Number of uncomputed tokens of running prompts, plus all tokens of waiting sequences."""
        running = sum(sequence.uncomputed_tokens for sequence in self.running if sequence.is_prompt)
        return running + sum(len(sequence.token_ids) for sequence in self.waiting)

    @property
    def held_by_sequences(self) -> int:
        """Number of blocks of running sequences, including blocks shared with transfers."""
        return self.pool.counts.held - self.held_by_transfers

    @property
    def held_by_transfers(self) -> int:
        """Blocks held only by reservations, pinned prompts and fetches."""
        if not self.holds_for_transfers:
            return 0
        sequences = chain(self.reserved.values(), self.pinned.values())
        held = (sequence.held().held_blocks for sequence in sequences)
        return self.pool.held_only_by(chain(held, (incoming.blocks for incoming in self._incoming)))

    @property
    def unfilled_slots(self) -> int:
        """Token slots without KV in the blocks of answers: internal fragmentation."""
        running = (sequence for sequence in self.running if not sequence.request.prefill_only)
        return unfilled_slots(running, self._block_tokens)

    def blocks_at_once(self, sequences: int, blocks: int) -> int:
        """Return the blocks needed to admit `sequences` sequences of `blocks` blocks each, so that all run together."""
        return sequences * blocks + self.pool.groups.blocks(headroom_blocks(sequences - 1))

    def make(self, request: Request, cache_root: bytes | None) -> ScheduledSequence:
        """Create a sequence with the next arrival number. The sequence does not wait or run yet."""
        # A Prefill command has hashes but no cache root: the hash chain continues from the last hash.
        root = cache_root or (request.block_hashes[-1] if request.block_hashes else None)
        hashes = None if root is None else HashChain(root, self._block_tokens, request.block_hashes)
        turn = ArrivalKey(self._arrivals, request.first_choice)
        self._arrivals += 1
        shared = None if request.params.beam is not None else cache_root
        sequence = ScheduledSequence(request, turn, list(request.token_ids), hashes, request.params.places, shared)
        if request.turn is not None:
            sequence.session = self.pool.order.sessions.begin(request.turn)
        return sequence

    def wait(self, sequence: ScheduledSequence) -> None:
        self.waiting.add(sequence)
        # Touch the sequence's cached blocks, so that they are evicted after others.
        known = self.pool.touch_columns(sequence.reusable_hashes(self._block_tokens))
        sequence.known_tokens = known * self._block_tokens
        self.requests.setdefault(sequence.request.request_id, {})[sequence.arrival_key.choice] = sequence

    def reserve(self, sequence: ScheduledSequence, columns: int, left_blocks: int, first_live: int) -> bool:
        """Reserve blocks for a new prompt whose KV will be received. Return False, without effect, if blocks are short.

        `left_blocks`: see `_hold`. `first_live`: see `acquire`.
        """
        if not self._hold(sequence, columns, left_blocks, first_live):
            return False
        self.reserved[sequence.request.request_id] = sequence
        self.requests[sequence.request.request_id] = {sequence.arrival_key.choice: sequence}
        return True

    def land(self, sequence: ScheduledSequence) -> list[ScheduledSequence]:
        """Start the choices of a reserved prompt whose KV has been received. Returns them in order."""
        del self.reserved[sequence.request.request_id]
        self.running.add(sequence)
        sequence.computed_tokens = len(sequence.token_ids)
        return self.split(sequence)

    def keep_landed(self, sequence: ScheduledSequence, blocks: int) -> None:
        """Cache the first `blocks` received blocks of a reserved prompt that will not run."""
        columns = self.pool.groups.complete_columns(blocks, sequence.held().first_live)
        landed_tokens = min(columns * self._block_tokens, len(sequence.token_ids))
        sequence.computed_tokens = max(sequence.computed_tokens, landed_tokens)
        sequence.publish(self._block_tokens)

    def pin(self, prompt: ScheduledSequence) -> None:
        """Pin a computed prompt until another worker has read its blocks.

        Publish the blocks only now: finite final logits prove that the KV of all earlier chunks is finite.
        """
        prompt.publish(self._block_tokens)
        self.running.remove(prompt)
        self.pinned[prompt.request.request_id] = prompt

    def begin_fetch(self, hashes: Sequence[bytes], worthwhile: Callable[[int], bool]) -> IncomingPrefix | None:
        """Allocate blocks to fetch the uncached KV of `hashes`. Return None if the prompt must be computed instead.

        No fetch is made if no KV is missing, blocks are short, or `worthwhile(missing columns)` is false.
        """
        known = self.pool.touch_columns(hashes)
        lacking = len(hashes) - known
        if not lacking or not worthwhile(lacking):
            return None
        groups = self.pool.groups
        try:
            named = NamedBlocks(self.pool, groups.links(hashes), groups.windowed_links(len(hashes)))
        except OutOfBlocks:
            return None
        incoming = IncomingPrefix(named, tuple(hashes), known)
        self._incoming.add(incoming)
        return incoming

    def end_fetch(self, incoming: IncomingPrefix, blocks: int) -> None:
        """Cache the first `blocks` fetched blocks, whose KV is valid, and free the others."""
        self._incoming.remove(incoming)
        incoming.named.publish(blocks)
        fresh = incoming.blocks[incoming.cached_blocks : blocks]
        incoming.named.release()
        self.pool.order.loaded(fresh)

    def begin_take_over(self, hashes: Sequence[bytes]) -> IncomingPrefix | None:
        """Allocate blocks for a session from another worker. Return None if local sessions or prompts need them."""
        spare_blocks = self.pool.available - self.pool.order.awaited_blocks - self.outstanding_blocks()
        return self.begin_fetch(hashes, lambda columns: self.pool.groups.blocks(columns) <= spare_blocks)

    def end_take_over(self, incoming: IncomingPrefix, blocks: int, turn: SessionTurn) -> None:
        """Cache the first `blocks` received blocks, free the others, and retain the cached ones for the session."""
        self._incoming.remove(incoming)
        incoming.named.publish(blocks)
        names = incoming.chain[: incoming.known_columns + incoming.new_columns(blocks)]
        incoming.named.release(self.pool.order.sessions.take_over(turn, names) if names else None)

    def end_prefetch(self, incoming: IncomingPrefix, blocks: int, session_id: bytes) -> None:
        """Cache the first `blocks` prefetched blocks before the session's next turn, and free the others."""
        self._incoming.remove(incoming)
        incoming.named.publish(blocks)
        order, fresh = self.pool.order, incoming.blocks[incoming.cached_blocks : blocks]
        incoming.named.release(order.sessions.keep_of(session_id))
        order.prefetched(fresh)

    def is_coming(self, sequence: ScheduledSequence) -> bool:
        """Return whether a running prompt will soon publish the first block that this waiting sequence lacks."""
        hashes = sequence.reusable_hashes(self._block_tokens)
        known = self.pool.touch_columns(hashes)
        return known < len(hashes) and any(other.makes(known, hashes[known]) for other in self.running)

    def admit(
        self, sequence: ScheduledSequence, most_slots: int, left_blocks: int = 0, takes_all: bool = False
    ) -> list[BlockSwap] | None:
        """Start a waiting sequence. Return the swaps from host memory, or None if slots or blocks are short.

        `left_blocks`: see `_hold`. The sequence takes blocks only for KV that exists, the others with `grow`; if it
        `takes_all`, it takes them now.
        """
        if self.used_slots + sequence.places > most_slots:
            return None
        columns, swapped = blocks_for(len(sequence.token_ids), self._block_tokens), sequence.swapped
        existing = 0 if swapped is None else blocks_for(swapped.tokens, self._block_tokens)
        first_live = None if swapped is None else swapped.first_live
        if not self._hold(sequence, columns, left_blocks, first_live, taken_columns=None if takes_all else existing):
            return None
        swaps = self._swap_in(sequence)
        sequence.lost_tokens = 0
        self.waiting.remove(sequence)
        self.running.add(sequence)
        return swaps

    def grow(self, prompt: ScheduledSequence, most_tokens: int, is_favoured: bool) -> int:
        """Take blocks for at most `most_tokens` next tokens of a running prompt. Return the number that has blocks.

        Blocks stay free for growing answers, except for one column of a prompt that `is_favoured`. A `prefill_only`
        prompt is never preempted. It takes blocks only if all that it still needs are available: then it can finish
        before any other, and return them, so prompts that wait for each other always have one that need not wait.
        """
        table, size, pool = prompt.held(), self._block_tokens, self.pool
        end = min(prompt.computed_tokens + most_tokens, len(prompt.token_ids))
        columns = blocks_for(end, size) - table.columns
        if columns > 0:
            headroom = self._headroom_blocks(but=prompt)
            needed = self.lacking_blocks(prompt) if prompt.request.prefill_only else 0
            if max(needed, columns * pool.column_blocks) > pool.available - headroom:
                self.relieve()
            spare = pool.available - headroom
            if is_favoured:
                spare = max(spare, min(pool.available, pool.column_blocks))
            table.append(min(columns, spare // pool.column_blocks) if needed <= spare > 0 else 0)
        return min(end, table.columns * size) - prompt.computed_tokens

    def relieve(self) -> bool:
        """Release blocks of running prompts that no window reads any more. Return whether any became available.

        Until blocks are short, prompts keep them: once computed, they are published, and cached for prompts that share
        only a part of the prefix.
        """
        groups, before = self.pool.groups, self.pool.available
        if groups.windowed and not self.in_flight:
            for each in self.running:
                each.held().pass_over(groups.first_live(each.computed_tokens))
        return self.pool.available > before

    def newest_preemptible(self) -> ScheduledSequence | None:
        """Return the newest running sequence that is not `prefill_only`; None if there is none."""
        return next((each for each in reversed(self.running) if not each.request.prefill_only), None)

    def preempt(self, sequence: ScheduledSequence) -> list[BlockSwap]:
        """Stop a running sequence and let it wait. Return the swaps to make before its blocks are written again."""
        # The newest token is computed again even if its KV exists, since its logits are needed.
        lost_tokens = min(sequence.computed_tokens, len(sequence.token_ids) - 1)
        self.counters.preemptions += 1
        table = sequence.held()
        table.pass_over(table.groups.first_live(lost_tokens))
        blocks, first_live = table.held(0, blocks_for(lost_tokens, self._block_tokens)), table.first_live
        slots = self._swap.take(len(blocks)) if blocks else None
        sequence.release()
        sequence.lost_tokens = lost_tokens
        self.running.remove(sequence)
        self.waiting.add(sequence)
        if slots is None:
            return []
        sequence.swapped = Swapped(slots, lost_tokens, first_live)
        return [BlockSwap(block, slot) for block, slot in zip(blocks, slots.slots, strict=True)]

    def split(self, prompt: ScheduledSequence) -> list[ScheduledSequence]:
        """Publish a computed prompt and create one sequence per choice; returns them in order."""
        prompt.publish(self._block_tokens)
        first, draws = prompt.arrival_key.choice, prompt.first_draws
        others = [prompt.fork(choice, self._block_tokens) for choice in range(first + 1, first + draws)]
        prompt.choices = 1
        for other in others:
            self.running.add(other)
            self.requests[prompt.request.request_id][other.arrival_key.choice] = other
        return [prompt, *others]

    def branch(self, beams: Sequence[ScheduledSequence], parents: Sequence[int]) -> list[ScheduledSequence]:
        """Return one sequence per entry of `parents`, which are indexes of `beams`.

        A beam's first child is the beam itself; further children are forks. Beams without children are removed. All
        beams must be fully computed.
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
        """Remove a sequence in any phase and release its blocks."""
        request_id = sequence.request.request_id
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            del (self.pinned if request_id in self.pinned else self.reserved)[request_id]
        choices = self.requests[request_id]
        if sequence.session is not None and sequence.request.turn is not None and len(choices) == 1:
            blocks = None if sequence.table is None else len(sequence.table.held_blocks)
            self.pool.order.sessions.end(sequence.session, sequence.request.turn, blocks, sequence.published_names)
        self.in_flight.end(sequence)
        if self._on_end is not None:
            self._on_end(sequence)
        del choices[sequence.arrival_key.choice]
        if not choices:
            del self.requests[request_id]

    def _hold(
        self,
        sequence: ScheduledSequence,
        columns: int,
        left_blocks: int,
        first_live: int | None = None,
        taken_columns: int | None = None,
    ) -> bool:
        """Give a sequence its block table: cached blocks, then new ones. Return False if blocks are short.

        `left_blocks`: number of blocks that must stay available, in addition to the headroom. `first_live`,
        `taken_columns`: see `acquire`.
        """
        hashes, spare_blocks = sequence.reusable_hashes(self._block_tokens), self._headroom_blocks() + left_blocks
        try:
            acquired = acquire(self.pool, hashes, columns, spare_blocks, first_live, taken_columns)
        except OutOfBlocks:
            return self.relieve() and self._hold(sequence, columns, left_blocks, first_live, taken_columns)
        sequence.table = acquired.table
        sequence.published_blocks = acquired.cached_columns
        sequence.computed_tokens = acquired.cached_columns * self._block_tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed_tokens
            if sequence.hashes is not None and sequence.request.params.prompt_logprobs is None:
                self.counters.cache_query_tokens += len(sequence.token_ids)
                self.counters.cache_hit_tokens += sequence.computed_tokens
        return True

    def _fork(self, beam: ScheduledSequence) -> ScheduledSequence:
        """Fork a beam under the lowest unused choice number."""
        choices = self.requests[beam.request.request_id]
        other = beam.fork(next(number for number in count() if number not in choices), self._block_tokens)
        choices[other.arrival_key.choice] = other
        self.running.add(other)
        return other

    def _headroom_blocks(self, but: ScheduledSequence | None = None) -> int:
        """Blocks to leave free for growing answers. `prefill_only` prompts need none: they have no answer here.

        `but`: running sequence that does not count.
        """
        growing = sum(not each.request.prefill_only for each in self.running if each is not but)
        return self.pool.groups.blocks(headroom_blocks(growing + len(self.reserved)))

    def _swap_in(self, sequence: ScheduledSequence) -> list[BlockSwap]:
        """Return the swaps that bring uncached blocks back from host memory. Free the host slots for the next plan."""
        swapped, sequence.swapped = sequence.swapped, None
        if swapped is None:
            return []
        table, groups = sequence.held(), self.pool.groups
        columns = blocks_for(swapped.tokens, self._block_tokens)
        cached = min(columns, sequence.computed_tokens // self._block_tokens)
        skipped = groups.blocks(cached, swapped.first_live)
        blocks = table.held(cached, columns, swapped.first_live)
        swaps = [BlockSwap(*pair) for pair in zip(blocks, swapped.slots.slots[skipped:], strict=True)]
        swapped.slots.release()
        if sequence.computed_tokens < swapped.tokens:
            sequence.computed_tokens = swapped.tokens
            table.pass_over(swapped.first_live)
        return swaps


def headroom_blocks(sequences: int) -> int:
    return -(-sequences // SEQUENCES_PER_RESERVED_BLOCK)


def admitted(
    prompts: Iterable[ScheduledSequence],
    is_coming: Callable[[ScheduledSequence], bool],
    admit: Callable[[ScheduledSequence], bool],
) -> Iterator[ScheduledSequence]:
    """Yield running prompts and newly admitted prompts, in order. A prompt is admitted when the iteration reaches it.

    A prompt is skipped for a few steps if a running prompt will publish a block that it lacks. Prompts behind a skipped
    prompt are admitted for at most as many tokens as the skipped prompt has. No prompt is admitted after one that does
    not fit, so that none takes the blocks that this one needs.

    `admit` starts a sequence, or returns False without effect if it does not fit.
    """
    passed: list[ScheduledSequence] = []
    left_tokens = math.inf  # tokens that may still be admitted before the skipped prompts
    for each in prompts:
        if each.table is not None:
            yield each
        elif left_tokens > 0 and len(passed) <= LOOKAHEAD:
            size_tokens = len(each.token_ids)
            if is_coming(each):
                passed.append(each)
                left_tokens = min(left_tokens, size_tokens - each.admitted_before)
            elif admit(each):
                for other in passed:
                    other.admitted_before += size_tokens
                left_tokens -= size_tokens
                yield each
            else:
                left_tokens = 0
