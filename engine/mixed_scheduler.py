"""Prefill and decode on one device: decode tokens first, and the rest of a step's budget for chunks of prompts.

Pure. Admission looks only at what a prompt needs now. When answers outgrow the pool the newest sequence gives up its
blocks and waits at the head of the line; resumed, its accepted tokens are fed again and never drawn again. The oldest
sequence always fits, since a request that does not fit into the empty pool is refused: so there is always progress.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from engine.block_table import BlockTable
from engine.hashing import HashChain
from engine.mixed_state import MixedCounters, MixedOutcome, MixedSequence, RequestFailed, TokenMade, Turn, next_chunk
from engine.pages import BlockPool, OutOfBlocks, PageError
from engine.plan import BlockCopy, ChunkResult, Drawn, NonFinite, Plan
from engine.sequence import Request, RequestRefused, RequestTooLong, blocks_for, check_request, end_reason
from engine.step_budget import StepBudget

SEQUENCES_PER_RESERVED_BLOCK = 4
"""Admission leaves one block for so many running sequences to grow into, lest it preempts what it just admitted."""


class MixedScheduler:
    """At most `max_sequences` choices, and steps of at most `max_step_tokens` tokens unless more choices than that run.

    With a `budget` the prompts' share of a step shrinks to what running answers can wait for.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_tokens: int,
        max_step_tokens: int,
        max_sequences: int,
        budget: StepBudget | None = None,
    ) -> None:
        self.pool = pool
        self.counters = MixedCounters()
        self._block_tokens = block_tokens
        self._max_step_tokens = max_step_tokens
        self._max_sequences = max_sequences
        self._budget = budget
        self._waiting: OrderedDict[Turn, MixedSequence] = OrderedDict()
        self._running: dict[Turn, MixedSequence] = {}  # both in order of turn, and all that run before all that wait
        self._requests: dict[int, dict[int, MixedSequence]] = {}  # by request and choice
        self._planned: tuple[MixedSequence, ...] = ()
        self._arrivals = 0

    def add(self, request: Request, cache_root: bytes | None = None) -> None:
        """Queues a request. Raises: RequestTooLong, RequestRefused.

        Its blocks are cached where the request brings hashes or the `cache_root` of its sequence is given; the answer's
        blocks too.
        """
        check_request(request, self._block_tokens)
        if request.request_id in self._requests:
            raise RequestRefused(f"request {request.request_id} is here already")
        longest = len(request.token_ids) + request.params.max_tokens - 1  # the last token's KV is never needed
        needed = blocks_for(longest, self._block_tokens)
        if needed > self.pool.total_blocks:
            raise RequestTooLong(f"a choice may need {needed} blocks; the pool has {self.pool.total_blocks}")
        if request.params.n > self._max_sequences:
            raise RequestTooLong(f"the request has {request.params.n} choices; at most {self._max_sequences} run")
        root = cache_root or (request.block_hashes[-1] if request.block_hashes else None)
        hashes = None if root is None else HashChain(root, self._block_tokens, request.block_hashes)
        turn = Turn(self._arrivals, 0)
        self._arrivals += 1
        sequence = MixedSequence(request, turn, list(request.token_ids), hashes, request.params.n)
        self._waiting[turn] = sequence
        self._requests[request.request_id] = {0: sequence}

    def plan(self) -> Plan | None:
        """The next step, or None when there is no work."""
        self._make_room()
        copies: list[BlockCopy] = []
        planned = [sequence for sequence in self._running.values() if sequence.uncomputed_tokens == 1]
        for sequence in planned:
            copies += self._grow(sequence.held(), sequence.computed_tokens)
        chunks = [next_chunk(sequence, budget_tokens=1) for sequence in planned]
        budget_tokens = self._prefill_budget(len(planned))
        prompts = self._prompts()
        while budget_tokens > 0 and (prompt := next(prompts, None)) is not None:
            chunk = next_chunk(prompt, budget_tokens)
            chunks.append(chunk)
            planned.append(prompt)
            budget_tokens -= len(chunk.token_ids)
        self._planned = tuple(planned)
        return Plan(tuple(chunks), tuple(copies)) if chunks else None

    def commit(self, plan: Plan, results: Sequence[ChunkResult]) -> list[MixedOutcome]:
        """Takes in what the step planned last computed, `results` parallel to the plan's chunks."""
        outcomes: list[MixedOutcome] = []
        for sequence, chunk, result in zip(self._planned, plan.chunks, results, strict=True):
            if sequence.table is None:
                continue  # ended since the plan was made, or failed in an earlier choice
            if isinstance(result, NonFinite):
                self.abort(chunk.request_id)
                outcomes.append(RequestFailed(chunk.request_id))
                continue
            sequence.computed_tokens = chunk.end
            if chunk.samples:
                outcomes += self._take(sequence, result)
        self._planned = ()
        return outcomes

    def observe(self, step_tokens: int, duration_s: float) -> None:
        """How long a step took, so that the next ones can be sized by it."""
        if self._budget is not None:
            self._budget.observe(step_tokens, duration_s)

    def stop_choice(self, request_id: int, choice: int) -> bool:
        """Ends one choice that has begun, at the caller's wish. Returns whether it was still being made."""
        sequence = self._requests.get(request_id, {}).get(choice)
        if sequence is None or not sequence.answer_tokens:
            return False
        self._end(sequence)
        return True

    def abort(self, request_id: int) -> bool:
        """Forgets a request in whatever phase and frees what it holds. Returns whether it was here."""
        sequences = tuple(self._requests.get(request_id, {}).values())
        for sequence in sequences:
            self._end(sequence)
        return bool(sequences)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def waiting_sequences(self) -> int:
        """Prompts never admitted, and sequences that were preempted."""
        return len(self._waiting)

    @property
    def running_sequences(self) -> int:
        """Places in the batch that are taken: a prompt takes one for each of its choices."""
        return sum(sequence.choices for sequence in self._running.values())

    @property
    def unfilled_slots(self) -> int:
        """Token slots of held blocks that have no KV yet: internal fragmentation. Walks all tables."""
        filled: Counter[int] = Counter()
        for sequence in self._running.values():
            for index, block in enumerate(sequence.held().blocks):
                tokens = sequence.computed_tokens - index * self._block_tokens
                filled[block] = max(filled[block], min(tokens, self._block_tokens), 0)
        return len(filled) * self._block_tokens - filled.total()

    def _prefill_budget(self, decode_tokens: int) -> int:
        left = max(0, self._max_step_tokens - decode_tokens)
        if decode_tokens == 0 or self._budget is None:
            return left  # nobody waits between two tokens
        return self._budget.prefill_tokens(decode_tokens, left)

    def _make_room(self) -> None:
        """Preempts the newest until every answer that runs can grow by a token.

        All of it before the first copy is planned: no block may be the source of one copy and then used anew.
        """
        while self._wanted_blocks() > self._available_blocks:
            if len(self._running) == 1:
                raise PageError("the oldest sequence does not fit: somebody else takes blocks from this pool")
            self._preempt(next(reversed(self._running.values())))

    @property
    def _available_blocks(self) -> int:
        counts = self.pool.counts
        return counts.free + counts.cached

    def _wanted_blocks(self) -> int:
        """Blocks that one more token for each answer takes: new ones, and copies of shared ones."""
        new, writers = 0, Counter[int]()
        for sequence in self._running.values():
            if sequence.uncomputed_tokens != 1:
                continue
            blocks, index = sequence.held().blocks, sequence.computed_tokens // self._block_tokens
            if index == len(blocks):
                new += 1
            else:
                writers[blocks[index]] += 1
        # The last one to write a block that nobody else reads keeps it.
        return new + sum(min(count, self.pool.references(block) - 1) for block, count in writers.items())

    def _grow(self, table: BlockTable, position: int) -> list[BlockCopy]:
        """Makes the block of `position` exist and be this table's alone."""
        index = position // self._block_tokens
        if index == len(table.blocks):
            table.append(1)
        copy = table.make_writable(index)
        return [] if copy is None else [copy]

    def _preempt(self, sequence: MixedSequence) -> None:
        self.counters.preemptions += 1
        self.counters.preempted_tokens += sequence.computed_tokens
        sequence.release()
        del self._running[sequence.turn]
        self._waiting[sequence.turn] = sequence
        self._waiting.move_to_end(sequence.turn, last=False)

    def _prompts(self) -> Iterator[MixedSequence]:
        """What is to be computed in chunks, in turn. Asking for one more admits it, if there is room for all of it."""
        yield from [sequence for sequence in self._running.values() if sequence.uncomputed_tokens > 1]
        while self._waiting:
            sequence = next(iter(self._waiting.values()))
            if not self._admit(sequence):
                return
            yield sequence

    def _admit(self, sequence: MixedSequence) -> bool:
        if self.running_sequences + sequence.choices > self._max_sequences:
            return False
        cached = self.pool.lookup(sequence.reusable_hashes(self._block_tokens))
        table = BlockTable(self.pool, cached)
        fresh = blocks_for(len(sequence.token_ids), self._block_tokens) - len(cached)
        reserve = -(-len(self._running) // SEQUENCES_PER_RESERVED_BLOCK)
        try:
            if fresh + reserve > self._available_blocks:
                raise OutOfBlocks(fresh + reserve, self._available_blocks)
            table.append(fresh)
        except OutOfBlocks:
            table.release()
            return False
        self._start(sequence, table, cached_blocks=len(cached))
        return True

    def _start(self, sequence: MixedSequence, table: BlockTable, cached_blocks: int) -> None:
        sequence.table = table
        sequence.published_blocks = cached_blocks
        sequence.computed_tokens = cached_blocks * self._block_tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed_tokens
            if sequence.hashes is not None:
                self.counters.cache_query_tokens += len(sequence.token_ids)
                self.counters.cache_hit_tokens += sequence.computed_tokens
        del self._waiting[sequence.turn]
        self._running[sequence.turn] = sequence

    def _take(self, sequence: MixedSequence, drawn: tuple[Drawn, ...]) -> list[MixedOutcome]:
        """One token for each choice that the sequence stands for."""
        sequence.publish(self._block_tokens)
        choices = [sequence]
        if sequence.choices > 1:
            choices += self._fork(sequence)
        return [self._append(choice, token) for choice, token in zip(choices, drawn, strict=True)]

    def _fork(self, prompt: MixedSequence) -> list[MixedSequence]:
        others = [prompt.fork(choice) for choice in range(1, prompt.choices)]
        prompt.choices = 1
        for other in others:
            self._running[other.turn] = other
            self._requests[prompt.request.request_id][other.turn.choice] = other
        self._running = dict(sorted(self._running.items()))
        return others

    def _append(self, sequence: MixedSequence, drawn: Drawn) -> TokenMade:
        request, offset = sequence.request, sequence.answer_tokens
        sequence.token_ids.append(drawn.token_id)
        end = end_reason(request.params, drawn.token_id, offset)
        if end is not None:
            self._end(sequence)
        return TokenMade(
            request.request_id, sequence.turn.choice, offset, drawn, end, cached_tokens=sequence.cached_tokens or 0
        )

    def _end(self, sequence: MixedSequence) -> None:
        if self._waiting.pop(sequence.turn, None) is None:
            del self._running[sequence.turn]
            sequence.release()
        choices = self._requests[sequence.request.request_id]
        del choices[sequence.turn.choice]
        if not choices:
            del self._requests[sequence.request.request_id]
