"""Computes prompts first come first served, in chunks, and keeps their blocks until they were read.

Pure: a prompt waits, is computed, and then is pinned until `release`. Plans are made and committed in turn.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from baton.engine.kv_cache.block_pool import BlockPool, OutOfBlocks
from baton.engine.kv_cache.block_table import BlockTable, acquire
from baton.engine.plan import Chunk, ChunkResult, Computed, Drawn, NonFinite, Plan, Sample, scored
from baton.engine.request import (
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
from baton.engine.scheduler.overtaking import admitted, is_coming


@dataclass(slots=True)
class WaitingPrompt:
    """A prompt that was not admitted yet."""

    request: Request
    overtaken_tokens: int = 0  # see engine/scheduler/overtaking.py

    @property
    def size_tokens(self) -> int:
        return len(self.request.token_ids)


@dataclass(slots=True)
class Prompt:
    """A prompt being computed. KV of its first `computed_tokens` tokens is written."""

    request: Request
    table: BlockTable  # of the whole prompt
    cached_tokens: int
    computed_tokens: int
    readable_blocks: int = 0  # reported in progress so far

    def makes(self, number: int, block_hash: bytes) -> bool:
        """Whether it computes this block, or read it from the cache."""
        return self.request.block_hashes[number : number + 1] == (block_hash,)


def next_chunk(prompt: Prompt, budget_tokens: int) -> Chunk:
    """The next at most `budget_tokens` tokens of a prompt; the last chunk draws a token for every choice."""
    request, start = prompt.request, prompt.computed_tokens
    token_ids = request.token_ids[start : start + budget_tokens]
    done = start + len(token_ids) == len(request.token_ids)
    samples = first_samples(request) if done else ()
    scores = scored(request.token_ids, start, start + len(token_ids), request.params.prompt_logprobs)
    return Chunk(request.request_id, token_ids, start, prompt.table.blocks, samples, scores, adapter=request.adapter)


def first_samples(request: Request) -> tuple[Sample, ...]:
    """The first token of every choice; they share one history, if the request's sampling looks back at all."""
    params = request.params
    history = request.token_ids if params.needs_history else ()
    return tuple(Sample(choice, params, history, request.prompt_tokens) for choice in request.first_choices)


def first_tokens(chunk: Chunk, drawn: tuple[Drawn, ...], offset: int = 0) -> tuple[FirstToken, ...]:
    """`offset`: of these tokens in the answer."""
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


PrefillRequest = Request


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """The progress of one prompt in one step.

    With the last chunk `first` is set and the prompt is pinned. Where `failed`, the logits were not finite, or for
    `cause`: the request is forgotten, its blocks are no longer held and none was published.
    """

    request_id: int
    computed_tokens: int  # of the prompt, from its start, cached ones included
    cached_tokens: int
    new_blocks: tuple[int, ...]  # in order, those that became readable in this step; the prompt's last may be part full
    first: tuple[FirstToken, ...] | None = None  # one per choice, in order
    prompt: tuple[Drawn, ...] = ()  # of `params.prompt_logprobs`: the next prompt tokens, from the second one on
    failed: bool = False
    cause: str = ""  # as in NonFinite


@dataclass(frozen=True, slots=True, eq=False)
class IncomingPrefix:
    """Blocks that are being filled by someone else, for the prefix cache. To be ended by `landed`, once."""

    hashes: tuple[bytes, ...]
    table: BlockTable
    cached_blocks: int  # the first so many were here already

    @property
    def blocks(self) -> tuple[int, ...]:
        return self.table.blocks


class PrefillScheduler:
    """Fills steps of at most `chunk_tokens` tokens with the oldest prompts.

    The last step of a prompt that takes several computes at most `tail_tokens` of it, where that is not 0: the blocks
    computed before are transferred meanwhile, and little is left to wait for.
    """

    def __init__(self, pool: BlockPool, block_tokens: int, chunk_tokens: int, tail_tokens: int = 0) -> None:
        self.pool = pool
        self._tail_tokens = tail_tokens
        self._block_tokens = block_tokens
        self.chunk_tokens = chunk_tokens  # may be changed between two plans
        self._waiting: dict[int, WaitingPrompt] = {}
        self._computing: dict[int, Prompt] = {}
        self._pinned: dict[int, BlockTable] = {}
        self._incoming: set[IncomingPrefix] = set()
        self.cache_query_tokens = 0  # of prompts that could be looked up, since the start
        self.cache_hit_tokens = 0  # of those, tokens that were here

    def add(self, request: Request) -> None:
        """Queues a prompt. Raises: RequestTooLong, RequestRefused."""
        check_request(request, self._block_tokens)
        if self._knows(request.request_id):
            raise RequestRefused(f"request {request.request_id} is here already")
        needed = blocks_for(len(request.token_ids), self._block_tokens)
        if needed > self.pool.total_blocks:
            raise RequestTooLong(f"the prompt needs {needed} blocks; the pool has {self.pool.total_blocks}")
        self._waiting[request.request_id] = WaitingPrompt(request)
        self.pool.touch(self._cacheable(request))  # others are evicted before those while it waits

    def plan(self) -> Plan | None:
        """The next step, or None when nothing can run now: no work, or no room until something is released."""
        budget_tokens = self.chunk_tokens
        chunks: list[Chunk] = []
        for prompt in self._in_turn():
            chunk = next_chunk(prompt, self._without_tail(prompt, budget_tokens))
            chunks.append(chunk)
            budget_tokens -= len(chunk.token_ids)
            if budget_tokens == 0:
                break
        return Plan(tuple(chunks)) if chunks else None

    def commit(self, plan: Plan, results: Sequence[ChunkResult]) -> list[PrefillProgress]:
        """Takes in the results of a step, `results` parallel to the plan's chunks."""
        progress: list[PrefillProgress] = []
        for chunk, result in zip(plan.chunks, results, strict=True):
            prompt = self._computing.get(chunk.request_id)
            if prompt is None:
                continue  # aborted since the plan was made
            if isinstance(result, NonFinite):
                if result.kv_suspect:
                    self.pool.distrust(prompt.table.blocks)
                progress.append(self._fail(prompt, result.cause))
            else:
                progress.append(self._advance(prompt, chunk, result))
        return progress

    def release(self, request_id: int) -> None:
        """The transfer of a pinned prompt has ended: gives its blocks back. Raises: UnknownRequest if not pinned."""
        table = self._pinned.pop(request_id, None)
        if table is None:
            raise UnknownRequest(request_id)
        table.release()

    def abort(self, request_id: int) -> bool:
        """Forgets a prompt in any phase and gives its blocks back at once. Returns whether it was here."""
        if self._waiting.pop(request_id, None) is not None:
            return True
        prompt = self._computing.pop(request_id, None)
        table = self._pinned.pop(request_id, None) if prompt is None else prompt.table
        if table is None:
            return False
        table.release()
        return True

    def land(self, hashes: Sequence[bytes], worthwhile: Callable[[int], bool]) -> IncomingPrefix | None:
        """Takes blocks for the KV of `hashes` as far as the cache lacks it, if that many are `worthwhile`.

        None when nothing is lacking, it is not worthwhile, or there is no room now: the prompt is then computed.
        """
        table = BlockTable(self.pool, self.pool.lookup(hashes))
        cached_blocks = len(table.blocks)
        lacking, counts = len(hashes) - cached_blocks, self.pool.counts
        if not 0 < lacking <= counts.free + counts.cached or not worthwhile(lacking):
            table.release()
            return None
        table.append(lacking)
        incoming = IncomingPrefix(tuple(hashes), table, cached_blocks)
        self._incoming.add(incoming)
        return incoming

    def landed(self, incoming: IncomingPrefix, blocks: int) -> None:
        """The KV of the first `blocks` is there, valid: they are in the cache from now on. The others are free."""
        self._incoming.remove(incoming)
        incoming.table.publish(incoming.hashes[:blocks])
        incoming.table.release()

    @property
    def has_work(self) -> bool:
        """Whether a prompt waits or is being computed; pinned ones need no step."""
        return bool(self._waiting or self._computing)

    @property
    def waiting_requests(self) -> int:
        return len(self._waiting)

    @property
    def running_sequences(self) -> int:
        """Prompts that are being computed."""
        return len(self._computing)

    @property
    def pending_tokens(self) -> int:
        """Tokens still to be computed; for waiting prompts the whole prompt, since cache hits are not known yet."""
        waiting = sum(prompt.size_tokens for prompt in self._waiting.values())
        computing = sum(len(p.request.token_ids) - p.computed_tokens for p in self._computing.values())
        return waiting + computing

    @property
    def held_by_sequences(self) -> int:
        """Blocks of prompts that are being computed, alone or together with pinned ones."""
        return self.pool.counts.held - self.held_by_transfers

    @property
    def held_by_transfers(self) -> int:
        """Blocks that only pinned prompts hold, or that are being filled by a fetch."""
        tables = chain(self._pinned.values(), (incoming.table for incoming in self._incoming))
        return self.pool.held_only_by(table.blocks for table in tables)

    def _knows(self, request_id: int) -> bool:
        return request_id in self._waiting or request_id in self._computing or request_id in self._pinned

    def _in_turn(self) -> Iterator[Prompt]:
        """Prompts in order of arrival. Asking for one more admits it, if there is room for all of it."""
        yield from tuple(self._computing.values())
        yield from admitted(self._waiting.values(), self._is_coming, self._admit)

    def _admit(self, waiting: WaitingPrompt) -> Prompt | None:
        request = waiting.request
        needed = blocks_for(len(request.token_ids), self._block_tokens)
        try:
            acquired = acquire(self.pool, self._cacheable(request), needed)
        except OutOfBlocks:
            return None
        cached_tokens = acquired.cached_blocks * self._block_tokens
        if request.block_hashes and request.params.prompt_logprobs is None:
            self.cache_query_tokens += len(request.token_ids)
            self.cache_hit_tokens += cached_tokens
        prompt = Prompt(request, acquired.table, cached_tokens, computed_tokens=cached_tokens)
        del self._waiting[request.request_id]
        self._computing[request.request_id] = prompt
        return prompt

    def _without_tail(self, prompt: Prompt, budget_tokens: int) -> int:
        """How much of the budget to spend on a prompt, in whole blocks where its tail is left for a step of its own."""
        end = len(prompt.request.token_ids)
        began, start = prompt.computed_tokens > prompt.cached_tokens, prompt.computed_tokens
        if not began or not 0 < self._tail_tokens < end - start <= budget_tokens:
            return budget_tokens
        return blocks_for(end - self._tail_tokens, self._block_tokens) * self._block_tokens - start

    def _is_coming(self, waiting: WaitingPrompt) -> bool:
        """Whether a prompt that is computed will publish the first block that the cache lacks of it."""
        hashes, others = self._cacheable(waiting.request), self._computing.values()
        return is_coming(self.pool, hashes, lambda *block: any(other.makes(*block) for other in others))

    def _cacheable(self, request: Request) -> tuple[bytes, ...]:
        """Blocks that need no computing if they are here; none where the logits of all prompt tokens are asked for."""
        return () if request.params.prompt_logprobs is not None else reusable_hashes(request, self._block_tokens)

    def _advance(self, prompt: Prompt, chunk: Chunk, result: Computed) -> PrefillProgress:
        end = chunk.end - 1 if result.late else chunk.end
        prompt.computed_tokens = end
        done = end == len(prompt.request.token_ids)
        readable = len(prompt.table.blocks) if done else end // self._block_tokens
        new_blocks = prompt.table.blocks[prompt.readable_blocks : readable]
        prompt.readable_blocks = readable
        if done:
            self._pin(prompt)
        first = first_tokens(chunk, result.drawn, prompt.request.answered_tokens) if done else None
        return PrefillProgress(chunk.request_id, end, prompt.cached_tokens, new_blocks, first, prompt=result.prompt)

    def _pin(self, prompt: Prompt) -> None:
        """Only now are blocks published: finite logits at the end vouch for the KV of every chunk before."""
        del self._computing[prompt.request.request_id]
        prompt.table.publish(prompt.request.block_hashes)
        self._pinned[prompt.request.request_id] = prompt.table

    def _fail(self, prompt: Prompt, cause: str) -> PrefillProgress:
        request_id = prompt.request.request_id
        self.abort(request_id)
        computed, cached = prompt.computed_tokens, prompt.cached_tokens
        return PrefillProgress(request_id, computed, cached, new_blocks=(), failed=True, cause=cause)
