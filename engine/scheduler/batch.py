"""The sequences of a scheduler: which run, which wait, which blocks each holds, and how that changes. Pure.

A sequence waits (without blocks, perhaps with its KV in host memory), runs, or is reserved: its prompt's KV is being
copied into its blocks. A prompt that was computed for another worker is pinned until that has read its blocks.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
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

LOOKAHEAD = 64  # prompts that may be passed over in one step: each of them is looked up in the cache


@dataclass(frozen=True, slots=True, eq=False)
class IncomingPrefix:
    """Blocks that are being filled by a fetch, for the prefix cache. To be ended by `end_fetch`, once."""

    named: NamedBlocks
    chain: tuple[bytes, ...]  # hashes of a prompt's columns, which can be reused once all blocks are filled
    known_columns: int  # of those, could before

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """Names of the blocks."""
        return self.named.names

    @property
    def blocks(self) -> tuple[int, ...]:
        return self.named.blocks

    @property
    def cached_blocks(self) -> int:
        """The first so many were here already."""
        return self.named.cached

    def new_columns(self, blocks: int) -> int:
        """That can be reused since the first so many blocks are filled. With windows, all or none."""
        if len(self.blocks) != len(self.chain):
            return len(self.chain) - self.known_columns if blocks == len(self.blocks) else 0
        return max(0, blocks - self.known_columns)


class Write(NamedTuple):
    """KV of one token."""

    table: BlockTable
    position: int


def wanted_blocks(running: Iterable[ScheduledSequence], pool: BlockPool, block_tokens: int) -> int:
    """Blocks that one more token for each answer takes."""
    growing = (sequence for sequence in running if sequence.is_answer)
    return blocks_to_write((Write(each.held(), each.computed_tokens) for each in growing), pool, block_tokens)


def blocks_to_write(writes: Iterable[Write], pool: BlockPool, block_tokens: int) -> int:
    """New blocks, and copies of shared ones."""
    new, writers = 0, Counter[int]()
    for table, position in writes:
        index = position // block_tokens
        if index == table.columns:
            new += pool.groups.count
        else:
            writers.update(table.column(index))
    # The last writer of a block without other readers keeps it.
    return new + sum(min(count, pool.references(block) - 1) for block, count in writers.items())


def unfilled_slots(running: Iterable[ScheduledSequence], block_tokens: int) -> int:
    """Token slots of their blocks that have no KV yet: the PagedAttention paper's internal fragmentation.

    Looks only at the ends of tables, behind the KV that is written; a block that several share counts once.
    """
    filled: dict[int, int] = {}
    for sequence in running:
        complete, rest = divmod(sequence.computed_tokens, block_tokens)
        table = sequence.held()
        for index in range(complete, table.columns):
            for block in table.column(index):
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

    def __init__(
        self,
        pool: BlockPool,
        block_tokens: int,
        swap: SwapSpace,
        on_end: Callable[[ScheduledSequence], None] | None = None,
    ) -> None:
        """`on_end` is called with each sequence that is forgotten."""
        self.pool = pool
        self.counters = SchedulerCounters()
        self.in_flight = StepsInFlight()
        self.waiting = ArrivalOrder()
        self.running = ArrivalOrder()
        self.reserved: dict[int, ScheduledSequence] = {}  # by request
        self.pinned: dict[int, ScheduledSequence] = {}  # by request
        self._incoming: set[IncomingPrefix] = set()
        self.requests: dict[int, dict[int, ScheduledSequence]] = {}  # by request and choice, in any phase
        self._block_tokens = block_tokens
        self._swap = swap
        self._on_end = on_end
        self._arrivals = 0

    @property
    def holds_for_transfers(self) -> bool:
        """Whether blocks will become free that no answer uses: each transfer ends in bounded time."""
        return bool(self.reserved or self.pinned or self._incoming)

    @property
    def claimed_blocks(self) -> int:
        """Blocks that waiting sequences need at once, as if none of them were cached."""
        columns = sum(blocks_for(len(sequence.token_ids), self._block_tokens) for sequence in self.waiting)
        return self.pool.groups.blocks(columns)

    @property
    def claimed_slots(self) -> int:
        return sum(sequence.places for sequence in self.waiting)

    @property
    def running_sequences(self) -> int:
        """Choices that run, or will when their prompt is computed; a `prefill_only` prompt counts as one."""
        return sum(max(1, sequence.places) for sequence in self.running)

    @property
    def used_slots(self) -> int:
        """Places in the batch that are taken or reserved: a prompt takes one for each of its choices."""
        return sum(sequence.places for sequence in chain(self.running, self.reserved.values()))

    @property
    def pending_tokens(self) -> int:
        """Tokens to compute before the next one is drawn; all tokens of waiting ones, since hits are not known yet."""
        running = sum(sequence.uncomputed_tokens for sequence in self.running if sequence.is_prompt)
        return running + sum(len(sequence.token_ids) for sequence in self.waiting)

    @property
    def held_by_sequences(self) -> int:
        """Blocks of running sequences, alone or together with transfers."""
        return self.pool.counts.held - self.held_by_transfers

    @property
    def held_by_transfers(self) -> int:
        """Blocks that only reservations and pinned prompts hold, or that are being filled by a fetch."""
        if not self.holds_for_transfers:
            return 0
        sequences = chain(self.reserved.values(), self.pinned.values())
        held = (sequence.held().held_blocks for sequence in sequences)
        return self.pool.held_only_by(chain(held, (incoming.blocks for incoming in self._incoming)))

    @property
    def unfilled_slots(self) -> int:
        """Token slots of blocks of answers that have no KV yet: internal fragmentation."""
        running = (sequence for sequence in self.running if not sequence.request.prefill_only)
        return unfilled_slots(running, self._block_tokens)

    def blocks_at_once(self, sequences: int, blocks: int) -> int:
        """Blocks that so many sequences of `blocks` each take where the last is to be admitted beside the others."""
        return sequences * blocks + self.pool.groups.blocks(headroom_blocks(sequences - 1))

    def make(self, request: Request, cache_root: bytes | None) -> ScheduledSequence:
        """The newest sequence, in no phase yet."""
        # A Prefill command brings hashes and no root: the chain continues from the last of them, whatever its root is.
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
        self.pool.touch_columns(sequence.reusable_hashes(self._block_tokens))  # others are evicted before those
        self.requests.setdefault(sequence.request.request_id, {})[sequence.arrival_key.choice] = sequence

    def reserve(self, sequence: ScheduledSequence, columns: int, first_live: int) -> bool:
        """Gives a sequence that was just made blocks for its prompt to land in. False: not enough, nothing is taken.

        `first_live`: see `acquire`.
        """
        if not self._hold(sequence, columns, self.claimed_blocks, first_live):
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
        columns = self.pool.groups.complete_columns(blocks, sequence.held().first_live)
        landed_tokens = min(columns * self._block_tokens, len(sequence.token_ids))
        sequence.computed_tokens = max(sequence.computed_tokens, landed_tokens)
        sequence.publish(self._block_tokens)

    def pin(self, prompt: ScheduledSequence) -> None:
        """A running prompt is computed, and stays until it was read.

        Only now are its blocks published: finite logits at the end vouch for the KV of every chunk before.
        """
        prompt.publish(self._block_tokens)
        self.running.remove(prompt)
        self.pinned[prompt.request.request_id] = prompt

    def begin_fetch(self, hashes: Sequence[bytes], worthwhile: Callable[[int], bool]) -> IncomingPrefix | None:
        """Takes blocks for the KV of `hashes` as far as the cache lacks it, if that many are `worthwhile`.

        None when nothing is lacking, it is not worthwhile, or there is no room now: the prompt is then computed.
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
        """The KV of the first `blocks` is there, valid: they are in the cache from now on. The others are free."""
        self._incoming.remove(incoming)
        incoming.named.publish(blocks)
        fresh = incoming.blocks[incoming.cached_blocks : blocks]
        incoming.named.release()
        self.pool.order.loaded(fresh)

    def begin_take_over(self, hashes: Sequence[bytes]) -> IncomingPrefix | None:
        """The same into blocks that are free or that no turn is expected to use; None where they are too few."""
        spare_blocks = self.pool.available - self.pool.order.awaited_blocks
        return self.begin_fetch(hashes, lambda columns: self.pool.groups.blocks(columns) <= spare_blocks)

    def end_take_over(self, incoming: IncomingPrefix, blocks: int, turn: SessionTurn) -> None:
        """As `end_fetch`; from now on they are kept for this session."""
        self._incoming.remove(incoming)
        incoming.named.publish(blocks)
        names = incoming.chain[: incoming.known_columns + incoming.new_columns(blocks)]
        incoming.named.release(self.pool.order.sessions.take_over(turn, names) if names else None)

    def end_prefetch(self, incoming: IncomingPrefix, blocks: int, session_id: bytes) -> None:
        """As `end_fetch`; they are there before the session's next turn."""
        self._incoming.remove(incoming)
        incoming.named.publish(blocks)
        order, fresh = self.pool.order, incoming.blocks[incoming.cached_blocks : blocks]
        incoming.named.release(order.sessions.keep_of(session_id))
        order.prefetched(fresh)

    def is_coming(self, sequence: ScheduledSequence) -> bool:
        """Whether a running prompt is about to publish the first block that the cache lacks of a waiting sequence."""
        hashes = sequence.reusable_hashes(self._block_tokens)
        known = self.pool.touch_columns(hashes)
        return known < len(hashes) and any(other.makes(known, hashes[known]) for other in self.running)

    def admit(self, sequence: ScheduledSequence, most_slots: int) -> list[BlockSwap] | None:
        """Lets a waiting sequence run. Returns the swaps back from host memory; None: no room, nothing is taken."""
        if self.used_slots + sequence.places > most_slots:
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
        table = sequence.held()
        blocks, first_live = table.held(0, blocks_for(lost_tokens, self._block_tokens)), table.first_live
        slots = self._swap.take(len(blocks))
        sequence.release()
        sequence.lost_tokens = lost_tokens
        self.running.remove(sequence)
        self.waiting.add(sequence)
        if slots is None:
            return []
        sequence.swapped = Swapped(slots, lost_tokens, first_live)
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

    def _hold(self, sequence: ScheduledSequence, columns: int, beside: int, first_live: int | None = None) -> bool:
        """Gives a sequence its first table: cached blocks, then fresh ones. `beside`: so many stay available.

        `first_live`: see `acquire`.
        """
        hashes = sequence.reusable_hashes(self._block_tokens)
        try:
            acquired = acquire(self.pool, hashes, columns, self._headroom_blocks + beside, first_live)
        except OutOfBlocks:
            return False
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
        """Another sequence under the least choice that is free."""
        choices = self.requests[beam.request.request_id]
        other = beam.fork(next(number for number in count() if number not in choices), self._block_tokens)
        choices[other.arrival_key.choice] = other
        self.running.add(other)
        return other

    @property
    def _headroom_blocks(self) -> int:
        """For answers to grow into; prompts that are only computed here have all their blocks."""
        computed_only = sum(sequence.request.prefill_only for sequence in self.running)
        columns = headroom_blocks(len(self.running) - computed_only + len(self.reserved))
        return self.pool.groups.blocks(columns)

    def _swap_in(self, sequence: ScheduledSequence) -> list[BlockSwap]:
        """Cached blocks need not be brought back. The slots are free at once: none is taken before the next plan."""
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
        self.counters.swapped_tokens += max(0, swapped.tokens - sequence.computed_tokens)
        if sequence.computed_tokens < swapped.tokens:
            sequence.computed_tokens = swapped.tokens
            table.pass_over(swapped.first_live)
        return swaps


def headroom_blocks(sequences: int) -> int:
    return -(-sequences // SEQUENCES_PER_RESERVED_BLOCK)


def admitted(
    waiting: Iterable[ScheduledSequence],
    is_coming: Callable[[ScheduledSequence], bool],
    admit: Callable[[ScheduledSequence], bool],
) -> Iterator[ScheduledSequence]:
    """Admits from `waiting`, the oldest first, one for each that is asked for. It is iterated over again and again.

    A prompt waits a few steps for a block that a running prompt is about to publish, rather than compute it again.
    Prompts behind it are admitted meanwhile, until they have as many tokens as it has itself: from then on none goes
    before it. A prompt that has no room ends the pass, so nothing overtakes it.

    `admit` takes a sequence out of `waiting`; False: there is no room, and nothing has changed.
    """
    passed: list[ScheduledSequence] = []
    left_tokens = math.inf  # may still go before those that were passed over
    while left_tokens > 0 and len(passed) <= LOOKAHEAD:
        each = next(islice(waiting, len(passed), None), None)
        if each is None:
            return
        size_tokens = len(each.token_ids)
        if is_coming(each):
            passed.append(each)
            left_tokens = min(left_tokens, size_tokens - each.overtaken_tokens)
            continue
        if not admit(each):
            return
        for other in passed:
            other.overtaken_tokens += size_tokens
        left_tokens -= size_tokens
        yield each
