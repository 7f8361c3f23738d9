"""Scheduler state of sequences, their order, steps in flight, and the builder of a plan. Pure."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import NamedTuple

from baton.engine.kv_cache.block_table import BlockTable
from baton.engine.kv_cache.sessions import Session
from baton.engine.kv_cache.swap_space import SwapSlots
from baton.engine.request import (
    UNKNOWN_TOKEN,
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
    """Sort key of arrival: older requests first, then choices in order."""

    arrival: int
    choice: int


class TokenMade(NamedTuple):
    """Generated token of one choice."""

    request_id: int
    choice: int
    offset: int  # position in the answer
    drawn: Drawn
    end: EndReason | None
    cached_tokens: int  # prompt tokens found in the prefix cache at first admission


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """Result of one computed chunk of a prompt. After the last chunk, a TokenMade of every choice follows, in order.

    The result of a `prefill_only` request's last chunk contains the first tokens instead; the blocks stay pinned.
    """

    request_id: int
    computed_tokens: int  # prompt tokens computed from the start, including cached ones
    cached_tokens: int  # prompt tokens found in the prefix cache at first admission
    ended: bool  # whether the prompt is complete
    prompt: tuple[Drawn, ...] = ()  # scores of prompt tokens, with `params.prompt_logprobs`; the first token has none
    new_blocks: tuple[int, ...] = ()
    """Blocks of a `prefill_only` request that became readable in this step, in order; the last may be partly filled."""
    first: tuple[FirstToken, ...] | None = None  # first tokens of a complete `prefill_only` request, one per choice
    pooled: tuple[float, ...] = ()  # vector of a complete request with `pooling`


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """Failure of a request, for example by non-finite logits. All its choices are removed."""

    request_id: int
    cause: str = ""  # reason, from NonFinite


SchedulerOutcome = TokenMade | PromptComputed | RequestFailed


@dataclass(slots=True)
class SchedulerCounters:
    """Counters since the start."""

    cache_query_tokens: int = 0  # tokens looked up in the prefix cache
    cache_hit_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Swapped:
    """KV of a preempted sequence in host memory."""

    slots: SwapSlots  # host slots in order of columns
    tokens: int  # number of leading tokens whose KV is stored
    first_live: int  # first column with blocks of windowed groups


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """Prompt, or one choice and its answer so far. KV of its first `computed_tokens` tokens is written.

    A prompt represents all choices of its request until their first tokens are sampled here or by a prefill worker.
    """

    request: Request
    arrival_key: ArrivalKey
    token_ids: list[int]  # prompt, tokens of earlier attempts, and generated tokens
    hashes: HashChain | None  # None if the sequence does not use the prefix cache
    choices: int  # number of choices that this sequence represents
    cache_root: bytes | None = None  # salt of the answers that may get drafts from this one; None: no answers
    table: BlockTable | None = None  # None while waiting and after the end
    computed_tokens: int = 0
    published_blocks: int = 0
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache; None before first admission
    lost_tokens: int = 0  # tokens whose KV was released by a preemption; 0 after resumption
    swapped: Swapped | None = None  # KV in host memory, only while waiting
    scored_tokens: int = 0  # prompt tokens with reported log-probabilities; the first token has none
    readable_blocks: int = 0  # blocks of a `prefill_only` request reported as readable so far
    pooled: tuple[float, ...] = ()  # sum of the chunks' pooled vectors so far
    admitted_before: int = 0  # tokens of other prompts admitted while this one waited for a block
    overtaken_tokens: int = 0  # tokens of younger prompts computed while this one was passed over
    known_tokens: int = 0  # leading tokens that were cached when it began to wait
    drafts: SequenceDrafts = field(default_factory=SequenceDrafts)
    session: Session | None = None
    plain_samples: tuple[Sample, ...] | None = None  # samples of one choice without history, equal in every step
    prompt_tokens: int = field(init=False)  # `request.prompt_tokens`, which is read in every step

    def __post_init__(self) -> None:
        self.prompt_tokens = self.request.prompt_tokens

    @property
    def uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.computed_tokens

    @property
    def pending_tokens(self) -> int:
        """Number of tokens to compute; for a waiting sequence, without tokens probably cached or swapped out."""
        if self.table is not None:
            return self.uncomputed_tokens
        return len(self.token_ids) - max(self.known_tokens, self.swapped.tokens if self.swapped is not None else 0)

    @property
    def made_tokens(self) -> int:
        """Number of generated tokens, including those from a prefill worker; 0 while it is a prompt."""
        return len(self.token_ids) - len(self.request.token_ids)

    @property
    def is_answer(self) -> bool:
        """Return whether only the newest token must be computed and the next one sampled."""
        return self.uncomputed_tokens == 1 and not self.request.prefill_only

    @property
    def is_prompt(self) -> bool:
        """Return whether the sequence is computed in chunks: a prompt, or tokens to recompute."""
        return self.uncomputed_tokens > 1 or self.request.prefill_only

    @property
    def may_draft(self) -> bool:
        """Return whether drafted tokens may be verified in addition to the newest token."""
        params = self.request.params
        return self.made_tokens > 0 and self.choices == 1 and params.beam is None and params.most_drafted != 0

    def draws(self, chunk: Chunk) -> bool:
        """Return whether the chunk's sample is valid: false if the chunk's drafted token was wrong."""
        return not chunk.is_draft or (chunk.end == len(self.token_ids) and chunk.token_ids[0] == self.token_ids[-1])

    @property
    def places(self) -> int:
        """Batch slots: one per choice that is generated here."""
        return 0 if self.request.prefill_only else self.choices

    @property
    def answer_tokens(self) -> int:
        """Number of answer tokens, including those of earlier attempts. It is the offset of the next token."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def first_draws(self) -> int:
        """Number of tokens to sample next: several only after a prompt with several choices."""
        return min(self.choices, self.request.params.first_draws)

    def held(self) -> BlockTable:
        """Return the sequence's block table. Raises: RuntimeError if it has none, which is a bug."""
        if self.table is None:
            raise RuntimeError(f"choice {self.arrival_key.choice} of request {self.request.request_id} holds no blocks")
        return self.table

    def release(self) -> None:
        """Release the sequence's blocks, if any; KV that is not cached must be recomputed."""
        if self.table is not None:
            self.table.release(None if self.session is None else self.session.keep)
        if self.swapped is not None:
            self.swapped.slots.release()
        self.table = self.swapped = None
        self.computed_tokens = 0
        self.published_blocks = 0

    def publish(self, block_tokens: int) -> None:
        """Publish the blocks that became complete, and release those that no window reads any more.

        Call it only if all results so far were finite.
        """
        complete, table = self.computed_tokens // block_tokens, self.held()
        if self.hashes is not None and complete > self.published_blocks:
            table.publish(self.hashes.first(complete, self.token_ids), self.published_blocks)
            self.published_blocks = complete
        if table.groups.windowed:
            table.pass_over(table.groups.first_live(self.computed_tokens))

    @property
    def published_names(self) -> list[bytes]:
        return [] if self.hashes is None else self.hashes.first(self.published_blocks, self.token_ids)

    def reusable_hashes(self, block_tokens: int) -> list[bytes]:
        """Return the hashes of blocks that need not be computed if they are cached.

        The newest token is always computed, for its logits. All tokens of a prompt are computed if log-probabilities of
        the prompt are requested or all its tokens are pooled.
        """
        if self.hashes is None or (self.request.params.prompt_logprobs is not None and not self.made_tokens):
            return []
        if self.request.pooling is not None and not self.request.pooling.reuses_prefix:
            return []
        return self.hashes.first((len(self.token_ids) - 1) // block_tokens, self.token_ids)

    def makes(self, number: int, block_hash: bytes) -> bool:
        """Return whether this prompt will publish its block `number`, and the block has this hash."""
        own = self.request.block_hashes[number : number + 1]
        return self.is_prompt and own == (block_hash,) and self.published_blocks <= number

    def samples(self, drafted: Sequence[int] = ()) -> tuple[Sample, ...]:
        """Return the samples of the next token, one for each choice. They share the token history, if needed.

        `drafted`: tokens assumed to precede the next token.
        """
        if self.plain_samples is not None and not drafted:
            return self.plain_samples
        params, first = self.request.params, self.arrival_key.choice
        history: Sequence[int] = ()
        if params.needs_history:
            history = [*self.token_ids, *drafted] if drafted else self.token_ids
        prompt_tokens = self.request.prompt_tokens
        samples = tuple(
            Sample(choice, params, history, prompt_tokens, len(drafted))
            for choice in range(first, first + self.first_draws)
        )
        if self.choices == 1 and not (params.needs_history or drafted):
            self.plain_samples = samples
        return samples

    def prompt_computed(self, chunk: Chunk, computed: Computed, block_tokens: int) -> PromptComputed:
        """Return the result of a prompt chunk, without log-probabilities that were reported before a preemption."""
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
        """Add a chunk's pooled vector to the sum. Returns the prompt's vector once the prompt is complete."""
        if part:
            self.pooled = tuple(map(add, self.pooled, part)) if self.pooled else part
        divisor = pooling.divisor(len(self.request.token_ids))
        return tuple(number / divisor for number in self.pooled) if ended else ()

    def fork(self, choice: int, block_tokens: int) -> "ScheduledSequence":
        """Return the sequence of another choice, which shares all blocks that contain KV."""
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
    """Sequences by arrival, each key at most once; lookups take logarithmic time."""

    def __init__(self) -> None:
        self._keys: list[ArrivalKey] = []
        self._sequences: list[ScheduledSequence] = []  # parallel to `_keys`

    def add(self, sequence: ScheduledSequence) -> None:
        """Add a sequence. Raises: ValueError for a duplicate key."""
        if sequence in self:
            raise ValueError(f"{sequence.arrival_key} is already queued")
        index = bisect_left(self._keys, sequence.arrival_key)
        self._keys.insert(index, sequence.arrival_key)
        self._sequences.insert(index, sequence)

    def remove(self, sequence: ScheduledSequence) -> None:
        """Remove a sequence. Raises: KeyError if it is not in the order."""
        if sequence not in self:
            raise KeyError(sequence.arrival_key)
        index = bisect_left(self._keys, sequence.arrival_key)
        del self._keys[index], self._sequences[index]

    def are(self, sequences: list[ScheduledSequence]) -> bool:
        """Return whether these are all sequences, in order."""
        return self._sequences == sequences

    def __contains__(self, sequence: ScheduledSequence) -> bool:
        index = bisect_left(self._keys, sequence.arrival_key)
        return self._keys[index : index + 1] == [sequence.arrival_key]

    def __iter__(self) -> Iterator[ScheduledSequence]:
        """Iterate from the oldest sequence; the order must not change during the iteration."""
        return iter(self._sequences)

    def __reversed__(self) -> Iterator[ScheduledSequence]:
        return reversed(self._sequences)

    def __len__(self) -> int:
        return len(self._keys)


def next_chunk(sequence: ScheduledSequence, budget_tokens: int) -> Chunk:
    """Return a chunk of at most `budget_tokens` next tokens. With the newest token, the chunk samples all choices."""
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
    """Return the first token of each choice, sampled by a prompt's last `chunk`. `offset`: position in the answer."""
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


@dataclass(slots=True)
class PlanBuilder:
    sequences: list[ScheduledSequence] = field(default_factory=list)  # parallel to `chunks`
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    swaps_out: list[BlockSwap] = field(default_factory=list)
    swaps_in: list[BlockSwap] = field(default_factory=list)
    short: list[ScheduledSequence] = field(default_factory=list)  # prompts that lack blocks for the step's tokens
    repeats: int = 0  # number of next steps that may have one token of each of the same sequences

    @property
    def oldest_short(self) -> ScheduledSequence | None:
        """Oldest preemptible prompt that lacks blocks."""
        preemptible = (each for each in self.short if not each.request.prefill_only)
        return min(preemptible, key=lambda each: each.arrival_key, default=None)

    def compute(self, sequence: ScheduledSequence, budget_tokens: int) -> int:
        """Add at most `budget_tokens` next tokens of a sequence. Returns their number."""
        chunk = next_chunk(sequence, budget_tokens)
        self.sequences.append(sequence)
        self.chunks.append(chunk)
        return len(chunk.token_ids)

    def follow(self, sequence: ScheduledSequence, place: int) -> None:
        """Add a chunk for the token that chunk `place` of the previous step will sample."""
        self.sequences.append(sequence)
        request, samples, numbers = sequence.request, sequence.samples(), sequence.held().numbers
        start, adapter = sequence.computed_tokens + 1, request.adapter
        self.chunks.append(
            Chunk(request.request_id, UNKNOWN_TOKEN, start, numbers, samples, adapter=adapter, follows=place)
        )

    def repeated(self, block_tokens: int) -> "PlanBuilder":
        """Return the step after this one, if `repeats` is positive. Each sequence may take a column."""
        draft = PlanBuilder(self.sequences, repeats=self.repeats - 1)
        add, new = draft.chunks.append, tuple.__new__  # the latter in half the time of Chunk(...)
        for place, (sequence, chunk) in enumerate(zip(self.sequences, self.chunks, strict=True)):
            request, table, samples, start = sequence.request, sequence.held(), chunk.samples, chunk.start + 1
            if not start % block_tokens:
                draft.copies += table.grow(start, block_tokens)
            number, adapter, numbers = request.request_id, request.adapter, table.numbers
            add(new(Chunk, (number, UNKNOWN_TOKEN, start, numbers, samples, None, None, adapter, place, False)))
        return draft

    def guess(self, sequence: ScheduledSequence, drafted: Sequence[int]) -> None:
        """Add a chunk for the last of the `drafted` tokens, which are assumed to follow the newest token."""
        request, start = sequence.request, sequence.computed_tokens + len(drafted)
        numbers, samples = sequence.held().numbers, sequence.samples(drafted)
        self.sequences.append(sequence)
        self.chunks.append(
            Chunk(request.request_id, [drafted[-1]], start, numbers, samples, adapter=request.adapter, is_draft=True)
        )

    def finish(self) -> Plan | None:
        """Return the plan, or None if there is nothing to do. Every sequence that is swapped in also has a chunk."""
        if not self.chunks and not self.swaps_out:
            return None
        return Plan(tuple(self.chunks), tuple(self.copies), tuple(self.swaps_out), tuple(self.swaps_in))


class StepsInFlight:
    """Steps planned but not committed, and finished sequences whose blocks such a step still writes.

    These blocks are released when no step in flight writes to them any more.
    """

    def __init__(self) -> None:
        self._steps: deque[PlanBuilder] = deque()
        self._ended: list[ScheduledSequence] = []  # finished sequences whose blocks steps in flight still write

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def ended(self) -> Sequence[ScheduledSequence]:
        return self._ended

    @property
    def latest(self) -> PlanBuilder:
        """Step planned last."""
        return self._steps[-1]

    def begin(self, step: PlanBuilder) -> None:
        self._steps.append(step)

    def finish(self) -> Sequence[ScheduledSequence]:
        """Complete the oldest step; return its sequences in chunk order. Release blocks that no later step writes."""
        done = self._steps.popleft()
        kept = [sequence for sequence in self._ended if self._writes(sequence)]
        for sequence in self._ended:
            if sequence not in kept:
                sequence.release()
        self._ended = kept
        return done.sequences

    def end(self, sequence: ScheduledSequence) -> None:
        """Release a finished sequence's blocks, now or once no step writes to them."""
        if self._writes(sequence):
            self._ended.append(sequence)
        else:
            sequence.release()

    def _writes(self, sequence: ScheduledSequence) -> bool:
        return any(sequence in step.sequences for step in self._steps)
