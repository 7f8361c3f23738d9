"""Continuous batching: every running choice gets one token a step; requests join and leave between any two steps.

Pure. A request first reserves blocks and places in the batch, then is activated once the KV of its prompt has landed.
What a request may need in the worst case is committed when it reserves, so that blocks never run out mid-answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.block_table import BlockTable, acquire
from engine.decode_state import Choice, Reserved, Running, WorstCase, worst_case
from engine.pages import BlockPool, OutOfBlocks
from engine.plan import BlockCopy, Chunk, ChunkResult, Drawn, NonFinite, Plan, Sample, TokenLogprob
from engine.sequence import (
    EndReason,
    FirstToken,
    Request,
    RequestRefused,
    RequestTooLong,
    UnknownRequest,
    blocks_for,
    check_request,
    end_reason,
    reusable_hashes,
)

DecodeRequest = Request


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks that a prompt's KV is to be copied into. The first `cached_blocks` hold it already: leave them alone."""

    blocks: tuple[int, ...]  # of the whole prompt, in order
    cached_blocks: int


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One token of one choice. Token 0 came from prefill, so the first offset made here is 1.

    Where `failed`, the logits were not finite: the whole request is forgotten with all its choices, and there is no
    token (`token_id` and `logprob` are 0).
    """

    request_id: int
    choice: int
    offset: int  # position within the answer
    token_id: int
    logprob: float
    end: EndReason | None
    failed: bool = False
    top: tuple[TokenLogprob, ...] = ()


class DecodeScheduler:
    """A batch of at most `max_sequences` choices over a pool that no one else takes blocks from."""

    def __init__(self, pool: BlockPool, block_tokens: int, max_sequences: int) -> None:
        self.pool = pool
        self._block_tokens = block_tokens
        self._max_sequences = max_sequences
        self._reserved: dict[int, Reserved] = {}
        self._running: dict[int, Running] = {}

    def reserve(self, request: Request) -> Reservation | None:
        """Takes the prompt's blocks and one more, and commits the worst case, all or nothing.

        None when there is no room now: the caller asks again, in its order of arrival, once something has ended.
        Raises: RequestTooLong when there can never be room; RequestRefused.
        """
        check_request(request, self._block_tokens)
        if request.request_id in self._reserved or request.request_id in self._running:
            raise RequestRefused(f"request {request.request_id} is here already")
        worst = worst_case(request, self._block_tokens)
        needed, choices = worst.total(request.params.n), request.params.n
        if needed > self.pool.total_blocks:
            raise RequestTooLong(f"the request may need {needed} blocks; the pool has {self.pool.total_blocks}")
        if choices > self._max_sequences:
            raise RequestTooLong(f"the request has {choices} choices; at most {self._max_sequences} run at once")
        if self.committed_blocks + needed > self.pool.total_blocks or self.used_slots + choices > self._max_sequences:
            return None
        return self._take(request, worst)

    def activate(self, request_id: int, first: Sequence[FirstToken]) -> None:
        """The KV of the whole prompt is in its blocks, valid: they are published, and the choices start to run.

        `first` has token 0 of every choice; one that ended there never runs. Raises: UnknownRequest, ValueError.
        """
        reserved = self._reserved.get(request_id)
        if reserved is None:
            raise UnknownRequest(request_id)
        if sorted(token.choice for token in first) != list(range(reserved.request.params.n)):
            raise ValueError(f"not one first token for each of {reserved.request.params.n} choices")
        del self._reserved[request_id]
        reserved.table.publish(reserved.request.block_hashes)
        going_on = [token for token in first if token.end is None]
        if not going_on:
            reserved.table.release()
            return
        prompt_blocks = blocks_for(len(reserved.request.token_ids), self._block_tokens)
        tables = [reserved.table, *(reserved.table.fork(prompt_blocks) for _ in going_on[1:])]
        choices = {
            token.choice: Choice(token.choice, table, token.token_id, 1, first_history(reserved.request, token))
            for token, table in zip(going_on, tables, strict=True)
        }
        self._running[request_id] = Running(reserved.request, reserved.worst_case, choices)

    def plan(self) -> Plan | None:
        """One token for every running choice, or None if there is none. Grows tables and copies shared last blocks."""
        chunks: list[Chunk] = []
        copies: list[BlockCopy] = []
        for running in self._running.values():
            prompt_tokens = len(running.request.token_ids)
            for choice in running.choices.values():
                start = prompt_tokens + choice.tokens - 1
                copies.extend(self._make_room(choice.table, start))
                sample = Sample(choice.index, running.request.params, choice.history, prompt_tokens)
                chunk = Chunk(running.request.request_id, (choice.last_token,), start, choice.table.blocks, (sample,))
                chunks.append(chunk)
        return Plan(tuple(chunks), tuple(copies)) if chunks else None

    def commit(self, plan: Plan, results: Sequence[ChunkResult]) -> list[SequenceStep]:
        """Takes in what a step computed, `results` parallel to the plan's chunks."""
        steps: list[SequenceStep] = []
        for chunk, result in zip(plan.chunks, results, strict=True):
            running = self._running.get(chunk.request_id)
            if running is None:
                continue  # aborted since the plan was made, or failed in an earlier choice
            choice = running.choices[chunk.samples[0].choice]
            if isinstance(result, NonFinite):
                self.abort(chunk.request_id)
                step = SequenceStep(chunk.request_id, choice.index, choice.tokens, 0, 0.0, end=None, failed=True)
            else:
                step = self._advance(running, choice, result[0])
            steps.append(step)
        return steps

    def abort(self, request_id: int) -> bool:
        """Forgets a request in whatever phase and frees what it holds. Returns whether it was here.

        Of a reserved request no copy into its blocks may be under way: end it first.
        """
        reserved = self._reserved.pop(request_id, None)
        if reserved is not None:
            reserved.table.release()
            return True
        running = self._running.pop(request_id, None)
        if running is None:
            return False
        for choice in running.choices.values():
            choice.table.release()
        return True

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    @property
    def waiting_requests(self) -> int:
        """Requests that hold a reservation and are not activated yet."""
        return len(self._reserved)

    @property
    def running_sequences(self) -> int:
        return sum(running.live_choices for running in self._running.values())

    @property
    def used_slots(self) -> int:
        """Places in the batch that are taken or reserved."""
        return sum(holder.live_choices for holder in self._holders())

    @property
    def committed_blocks(self) -> int:
        """Blocks that the requests here may hold in the worst case, as if they shared no prefix with each other."""
        return sum(holder.worst_case.total(holder.live_choices) for holder in self._holders())

    @property
    def held_by_sequences(self) -> int:
        """Blocks of running choices, alone or together with reservations."""
        return self.pool.counts.held - self.held_by_transfers

    @property
    def held_by_transfers(self) -> int:
        """Blocks that only reservations hold."""
        return self.pool.held_only_by(reserved.table.blocks for reserved in self._reserved.values())

    def _holders(self) -> Iterator[Reserved | Running]:
        yield from self._reserved.values()
        yield from self._running.values()

    def _take(self, request: Request, worst: WorstCase) -> Reservation | None:
        prompt_blocks = blocks_for(len(request.token_ids), self._block_tokens)
        at_once = min(prompt_blocks + 1, worst.total(choices=1))
        try:
            acquired = acquire(self.pool, reusable_hashes(request, self._block_tokens), at_once)
        except OutOfBlocks:
            return None
        self._reserved[request.request_id] = Reserved(request, worst, acquired.table)
        return Reservation(acquired.table.blocks[:prompt_blocks], acquired.cached_blocks)

    def _make_room(self, table: BlockTable, position: int) -> list[BlockCopy]:
        """Makes the block of `position` exist and be this table's alone. The worst case is committed, so it can."""
        index = position // self._block_tokens
        if index == len(table.blocks):
            table.append(1)
        copy = table.make_writable(index)
        return [] if copy is None else [copy]

    def _advance(self, running: Running, choice: Choice, drawn: Drawn) -> SequenceStep:
        request = running.request
        step = SequenceStep(
            request.request_id,
            choice.index,
            offset=choice.tokens,
            token_id=drawn.token_id,
            logprob=drawn.logprob,
            end=end_reason(request.params, drawn.token_id, choice.tokens),
            top=drawn.top,
        )
        if request.params.needs_history:
            choice.history.append(drawn.token_id)
        choice.last_token = drawn.token_id
        choice.tokens += 1
        if step.end is not None:
            self._end(running, choice)
        return step

    def _end(self, running: Running, choice: Choice) -> None:
        choice.table.release()
        del running.choices[choice.index]
        if not running.choices:
            del self._running[running.request.request_id]


def first_history(request: Request, first: FirstToken) -> list[int]:
    """Prompt and token 0, if the request's sampling looks back at all."""
    return [*request.token_ids, first.token_id] if request.params.needs_history else []
