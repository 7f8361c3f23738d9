"""The scheduler's state of a sequence, its order, its steps in flight, and a plan while it is being made. Pure."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import NamedTuple

from baton.engine.kv_cache.block_table import BlockTable
from baton.engine.kv_cache.sessions import Session
from baton.engine.kv_cache.swap_space import SwapSlots
from baton.engine.request import (
    UNKNOWN,
    BlockCopy,
    BlockSwap,
    Chunk,
    Computed,
    Drawn,
    EndReason,
    FirstToken,
    Plan,
    Request,
    Sample,
    blocks_for,
    end_reason,
    pooled,
    scored,
)
from baton.engine.scheduler.speculation import SequenceDrafts
from baton.text.block_hash import HashChain
from baton.text.pooling import Pooling


class ArrivalKey(NamedTuple):
    """Older requests come first, and a request's choices in order."""

    arrival: int
    choice: int


@dataclass(frozen=True, slots=True)
class TokenMade:
    """One token of one choice."""

    request_id: int
    choice: int
    offset: int  # position within the answer
    drawn: Drawn
    end: EndReason | None
    cached_tokens: int  # of the prompt, found in the prefix cache when the request was first admitted


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """A chunk of a prompt was computed here. With its last one the first token of every choice follows, in order.

    Of a request that is `prefill_only` this has those tokens itself: its blocks are pinned from then on.
    """

    request_id: int
    computed_tokens: int  # of the prompt, from its start, cached ones included
    cached_tokens: int  # as in TokenMade
    ended: bool  # the prompt is computed to its end
    prompt: tuple[Drawn, ...] = ()  # of `params.prompt_logprobs`: the next prompt tokens, from the second one on
    new_blocks: tuple[int, ...] = ()
    """Of a `prefill_only` request, in order: those that became readable in this step; the last may be part full."""
    first: tuple[FirstToken, ...] | None = None  # of a `prefill_only` request that has ended: one per choice, in order
    pooled: tuple[float, ...] = ()  # of a request with `pooling` that has ended


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The logits were not finite: the request is forgotten with all its choices."""

    request_id: int
    cause: str = ""  # as in NonFinite


SchedulerOutcome = TokenMade | PromptComputed | RequestFailed


@dataclass(slots=True)
class SchedulerCounters:
    """Sums since the start."""

    cache_query_tokens: int = 0  # of prompts that were looked up
    cache_hit_tokens: int = 0
    preemptions: int = 0
    preempted_tokens: int = 0  # whose KV was given up
    swapped_tokens: int = 0  # of those, came back from host memory
    recomputed_tokens: int = 0  # of those, neither came back nor were in the prefix cache


@dataclass(frozen=True, slots=True)
class Swapped:
    """The KV of a preempted sequence, in host memory."""

    slots: SwapSlots  # of its blocks, column after column
    tokens: int  # whose KV it is, from the first one
    first_live: int  # windows have their blocks from this column on


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """A prompt, or one choice with its answer so far. KV of its first `computed_tokens` tokens is written.

    A prompt stands for all choices of its request, until its last token's logits give each its first token, or a
    prefill worker's do.
    """

    request: Request
    arrival_key: ArrivalKey
    token_ids: list[int]  # of the request, and those made since
    hashes: HashChain | None  # None: keeps out of the cache
    choices: int  # it stands for
    cache_root: bytes | None = None  # its answer may draft for others with the same one; None: for none
    table: BlockTable | None = None  # None: waits, or has ended
    computed_tokens: int = 0
    published_blocks: int = 0
    cached_tokens: int | None = None  # of the prompt; None until first admitted
    lost_tokens: int = 0  # whose KV it gave up when it was preempted; 0 once it runs again
    swapped: Swapped | None = None  # only while it waits
    scored_tokens: int = 0  # of the prompt, after its first: their log-probabilities were reported
    readable_blocks: int = 0  # of a `prefill_only` request, reported so far
    pooled: tuple[float, ...] = ()  # of a request with `pooling`, summed up so far
    overtaken_tokens: int = 0  # of prompts that were admitted before it while it waited for a block
    drafts: SequenceDrafts = field(default_factory=SequenceDrafts)
    session: Session | None = None

    @property
    def uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.computed_tokens

    @property
    def made_tokens(self) -> int:
        """Tokens that were made here, or by a prefill worker for it: none as long as it is a prompt."""
        return len(self.token_ids) - len(self.request.token_ids)

    @property
    def is_answer(self) -> bool:
        """Whether only the newest token is to be computed, and the next one drawn."""
        return self.uncomputed_tokens == 1 and not self.request.prefill_only

    @property
    def is_prompt(self) -> bool:
        """Whether it is computed in chunks: a prompt, or tokens that are computed again."""
        return self.uncomputed_tokens > 1 or self.request.prefill_only

    @property
    def may_draft(self) -> bool:
        """Whether more tokens may be computed beside its newest one."""
        params = self.request.params
        return self.made_tokens > 0 and self.choices == 1 and params.beam is None and params.most_drafted != 0

    def draws(self, chunk: Chunk) -> bool:
        """Whether the chunk's token is the newest one: always, but for drafts that were wrong."""
        return not chunk.is_draft or (chunk.end == len(self.token_ids) and chunk.token_ids[0] == self.token_ids[-1])

    @property
    def places(self) -> int:
        """In the batch: one for each choice that is answered here."""
        return 0 if self.request.prefill_only else self.choices

    @property
    def answer_tokens(self) -> int:
        """The answer so far, with an earlier attempt's tokens: the offset of the next token."""
        return len(self.token_ids) - self.request.prompt_tokens

    @property
    def first_draws(self) -> int:
        """Tokens to be drawn after the newest one: several only after a prompt that stands for several choices."""
        return min(self.choices, self.request.params.first_draws)

    def held(self) -> BlockTable:
        """Raises: RuntimeError for a sequence that does not run, which is a fault of this program."""
        if self.table is None:
            raise RuntimeError(f"choice {self.arrival_key.choice} of request {self.request.request_id} holds no blocks")
        return self.table

    def release(self) -> None:
        """Gives back its blocks, if any; KV that is not in the cache then must be computed again."""
        if self.table is not None:
            self.table.release(None if self.session is None else self.session.keep)
        if self.swapped is not None:
            self.swapped.slots.release()
        self.table = self.swapped = None
        self.computed_tokens = 0
        self.published_blocks = 0

    def publish(self, block_tokens: int) -> None:
        """Names the blocks that became complete, and gives back those that no window reads any more.

        Only to be called when every chunk so far was finite.
        """
        complete, table = self.computed_tokens // block_tokens, self.held()
        if self.hashes is not None and complete > self.published_blocks:
            table.publish(self.hashes.first(complete, self.token_ids), self.published_blocks)
            self.published_blocks = complete
        if table.groups.windowed:
            table.pass_over(table.groups.first_live(self.computed_tokens))

    @property
    def published_names(self) -> list[bytes]:
        """Of its first blocks."""
        return [] if self.hashes is None else self.hashes.first(self.published_blocks, self.token_ids)

    def reusable_hashes(self, block_tokens: int) -> list[bytes]:
        """Blocks that need no computing if they are cached.

        The newest token is computed in any case, for its logits; every one of a prompt whose logits are asked for too,
        or whose tokens are all pooled.
        """
        if self.hashes is None or (self.request.params.prompt_logprobs is not None and not self.made_tokens):
            return []
        if self.request.pooling is not None and not self.request.pooling.reuses_prefix:
            return []
        return self.hashes.first((len(self.token_ids) - 1) // block_tokens, self.token_ids)

    def makes(self, number: int, block_hash: bytes) -> bool:
        """Whether it computes this block of its prompt, and has not published it yet."""
        own = self.request.block_hashes[number : number + 1]
        return self.is_prompt and own == (block_hash,) and self.published_blocks <= number

    def samples(self, drafted: Sequence[int] = ()) -> tuple[Sample, ...]:
        """The next token of every choice it stands for; all of them look back on the same tokens, if they do at all.

        `drafted`: tokens that are taken to come before it.
        """
        params, first = self.request.params, self.arrival_key.choice
        history: Sequence[int] = ()
        if params.needs_history:
            history = [*self.token_ids, *drafted] if drafted else self.token_ids
        prompt_tokens = self.request.prompt_tokens
        return tuple(
            Sample(choice, params, history, prompt_tokens, len(drafted))
            for choice in range(first, first + self.first_draws)
        )

    def prompt_computed(self, chunk: Chunk, computed: Computed, block_tokens: int) -> PromptComputed:
        """The outcome of a chunk of the prompt; without log-probabilities that were reported before a preemption."""
        new = computed.prompt[self.scored_tokens - chunk.start :]
        self.scored_tokens += len(new)
        end = chunk.end - computed.late
        ended, cached_tokens = end == len(self.request.token_ids), self.cached_tokens or 0
        if self.request.pooling is not None:
            vector = self._pool(self.request.pooling, computed.pooled, ended)
            return PromptComputed(chunk.request_id, end, cached_tokens, ended, pooled=vector)
        if not self.request.prefill_only:
            return PromptComputed(chunk.request_id, end, cached_tokens, ended, new)
        table = self.held()
        readable = table.columns if ended else end // block_tokens
        first_live = table.groups.first_live(len(self.request.token_ids))
        new_blocks, self.readable_blocks = table.held(self.readable_blocks, readable, first_live), readable
        first = first_tokens(chunk, computed.drawn, self.request.answered_tokens) if ended else None
        return PromptComputed(chunk.request_id, end, cached_tokens, ended, new, new_blocks, first)

    def _pool(self, pooling: Pooling, part: tuple[float, ...], ended: bool) -> tuple[float, ...]:
        """Adds a chunk's part. Returns the vector once the prompt has ended."""
        if part:
            self.pooled = tuple(map(add, self.pooled, part)) if self.pooled else part
        divisor = pooling.divisor(len(self.request.token_ids))
        return tuple(number / divisor for number in self.pooled) if ended else ()

    def fork(self, choice: int, block_tokens: int) -> "ScheduledSequence":
        """Another choice over the same prompt, sharing all blocks that have KV."""
        return ScheduledSequence(
            self.request,
            ArrivalKey(self.arrival_key.arrival, choice),
            list(self.token_ids),
            None if self.hashes is None else self.hashes.fork(),
            choices=1,
            cache_root=self.cache_root,
            table=self.held().fork(blocks_for(self.computed_tokens, block_tokens)),
            computed_tokens=self.computed_tokens,
            published_blocks=self.published_blocks,
            cached_tokens=self.cached_tokens,
            session=self.session,
        )


class ArrivalOrder:
    """Sequences in the order of their arrival, each key at most once. A search takes the logarithm of the length."""

    def __init__(self) -> None:
        self._keys: list[ArrivalKey] = []
        self._sequences: dict[ArrivalKey, ScheduledSequence] = {}

    def add(self, sequence: ScheduledSequence) -> None:
        """Raises: ValueError for a key that is here already."""
        if sequence.arrival_key in self._sequences:
            raise ValueError(f"{sequence.arrival_key} is queued already")
        self._sequences[sequence.arrival_key] = sequence
        insort(self._keys, sequence.arrival_key)

    def remove(self, sequence: ScheduledSequence) -> None:
        """Raises: KeyError for one that is not here."""
        del self._sequences[sequence.arrival_key]
        del self._keys[bisect_left(self._keys, sequence.arrival_key)]

    @property
    def newest(self) -> ScheduledSequence:
        return self._sequences[self._keys[-1]]

    def __contains__(self, sequence: ScheduledSequence) -> bool:
        return sequence.arrival_key in self._sequences

    def __iter__(self) -> Iterator[ScheduledSequence]:
        """The oldest first; the order may not change meanwhile."""
        return map(self._sequences.__getitem__, self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def next_chunk(sequence: ScheduledSequence, budget_tokens: int) -> Chunk:
    """The next at most `budget_tokens` tokens; the chunk with the newest token draws one for every choice."""
    start = sequence.computed_tokens
    token_ids = sequence.token_ids[start : start + budget_tokens]
    request, top = sequence.request, sequence.request.params.prompt_logprobs
    end, table = start + len(token_ids), sequence.held().numbers
    if request.pooling is not None:
        pools = pooled(request.pooling, start, end, len(request.token_ids))
        return Chunk(request.request_id, token_ids, start, table, pooled=pools, adapter=request.adapter)
    samples = sequence.samples() if len(token_ids) == sequence.uncomputed_tokens else ()
    scores = None if sequence.made_tokens else scored(request.token_ids, start, end, top)
    return Chunk(request.request_id, token_ids, start, table, samples, scores, adapter=request.adapter)


def first_tokens(chunk: Chunk, drawn: Sequence[Drawn], offset: int = 0) -> tuple[FirstToken, ...]:
    """Of a prompt whose last chunk this is; `offset`: of these tokens in the answer."""
    return tuple(
        FirstToken(
            sample.choice,
            token.token_id,
            token.logprob,
            end=end_reason(sample.params, token.token_id, offset) if sample.params.beam is None else None,
            top=token.top,
        )
        for sample, token in zip(chunk.samples, drawn, strict=True)
    )


def following_chunk(sequence: ScheduledSequence, place: int) -> Chunk:
    """The token after the newest one, not known yet: chunk `place` of the step before draws it."""
    return Chunk(
        sequence.request.request_id,
        [UNKNOWN],
        sequence.computed_tokens + 1,
        sequence.held().numbers,
        sequence.samples(),
        adapter=sequence.request.adapter,
        follows=place,
    )


def drafted_chunk(sequence: ScheduledSequence, drafted: Sequence[int]) -> Chunk:
    """The last of `drafted`, which are taken to come after the newest token."""
    return Chunk(
        sequence.request.request_id,
        drafted[-1:],
        sequence.computed_tokens + len(drafted),
        sequence.held().numbers,
        sequence.samples(drafted),
        adapter=sequence.request.adapter,
        is_draft=True,
    )


@dataclass(slots=True)
class PlanBuilder:
    """A plan while it is being made."""

    sequences: list[ScheduledSequence] = field(default_factory=list)  # parallel to `chunks`
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    swaps_out: list[BlockSwap] = field(default_factory=list)
    swaps_in: list[BlockSwap] = field(default_factory=list)

    def compute(self, sequence: ScheduledSequence, budget_tokens: int) -> int:
        """Adds the next tokens of a sequence, at most so many. Returns how many they are."""
        chunk = next_chunk(sequence, budget_tokens)
        self.sequences.append(sequence)
        self.chunks.append(chunk)
        return len(chunk.token_ids)

    def follow(self, sequence: ScheduledSequence, place: int) -> None:
        """Adds the token that the chunk at `place` of the step before is going to draw."""
        self.sequences.append(sequence)
        self.chunks.append(following_chunk(sequence, place))

    def guess(self, sequence: ScheduledSequence, drafted: Sequence[int]) -> None:
        """Adds the last of `drafted`, which are taken to come after the newest token."""
        self.sequences.append(sequence)
        self.chunks.append(drafted_chunk(sequence, drafted))

    def finish(self) -> Plan | None:
        """None where there is nothing to do. Sequences that swap in are computed too, so that is no case of its own."""
        if not self.chunks and not self.swaps_out:
            return None
        return Plan(tuple(self.chunks), tuple(self.copies), tuple(self.swaps_out), tuple(self.swaps_in))


class StepsInFlight:
    """Steps that are planned and not committed yet, and sequences that ended while such a step still writes their KV.

    No other sequence may get their blocks before that step is done.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[ScheduledSequence, ...]] = deque()
        self._ended: list[ScheduledSequence] = []  # hold their blocks until `finish` has no step with them left

    def __len__(self) -> int:
        """Steps under way."""
        return len(self._steps)

    @property
    def ended(self) -> Sequence[ScheduledSequence]:
        return self._ended

    @property
    def latest(self) -> tuple[ScheduledSequence, ...]:
        """Sequences of the step planned last, in the order of its chunks."""
        return self._steps[-1]

    def begin(self, sequences: Sequence[ScheduledSequence]) -> None:
        self._steps.append(tuple(sequences))

    def finish(self) -> tuple[ScheduledSequence, ...]:
        """The oldest step is done: its sequences, after giving back the blocks that were only kept for it."""
        done = self._steps.popleft()
        kept = [sequence for sequence in self._ended if self._writes(sequence)]
        for sequence in self._ended:
            if sequence not in kept:
                sequence.release()
        self._ended = kept
        return done

    def end(self, sequence: ScheduledSequence) -> None:
        """Gives back an ended sequence's blocks, now or when nothing writes to them any more."""
        if self._writes(sequence):
            self._ended.append(sequence)
        else:
            sequence.release()

    def _writes(self, sequence: ScheduledSequence) -> bool:
        return any(sequence in step for step in self._steps)
