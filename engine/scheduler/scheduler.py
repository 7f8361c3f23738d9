"""Scheduler of prefill and decode on one device: decode tokens first, then prompts with the rest of a step's budget.

Pure. A prompt is either computed here, or its KV is received from a prefill worker: blocks are reserved, the KV is
copied into them, and the request joins the batch with its first tokens. A `prefill_only` request is computed for
another worker: it takes no batch slot, is never preempted, and its blocks stay pinned after its first tokens.

Admission checks that a prompt fits now, but a prompt takes blocks only as its chunks are computed. When answers and
prompts outgrow the pool, the newest sequence is preempted: it releases its blocks and waits by age. On resumption its
KV is swapped in from host memory, or its tokens are computed again but never sampled again.

Progress is guaranteed. A request that does not fit into the empty pool is rejected, so the oldest sequence always fits
once every transfer has finished and every younger sequence is preempted. A `prefill_only` prompt takes blocks only if
all that it still needs are available. This keeps an order in which all of them can finish (Dijkstra's banker): such a
prompt can finish first, and so can one that is admitted, and then the others have what they had before.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from baton.engine.kv_cache.block_pool import BlockError, BlockPool
from baton.engine.kv_cache.swap_space import SwapSpace
from baton.engine.request import (
    Chunk,
    ChunkResult,
    Computed,
    Drawn,
    EndReason,
    FirstToken,
    NonFinite,
    Plan,
    Request,
    RequestRefused,
    RequestTooLong,
    Reservation,
    UnknownRequest,
    blocks_for,
    check_request,
    end_reason,
)
from baton.engine.scheduler.batch import RunningBatch, Write, admitted, blocks_to_write, wanted_blocks
from baton.engine.scheduler.beam_search import BeamGroups
from baton.engine.scheduler.budget import LentGain, PromptRates, StepBudget
from baton.engine.scheduler.drafting import Drafting
from baton.engine.scheduler.prompt_order import AIM_SHARE, LENT_SHARE, AssumedRates, PromptOrder, order_prompts
from baton.engine.scheduler.sequences import (
    PlanBuilder,
    RequestFailed,
    ScheduledSequence,
    SchedulerCounters,
    SchedulerOutcome,
    TokenMade,
)
from baton.engine.scheduler.speculation import Speculation
from baton.text.block_groups import CHARGED_ANSWER_TOKENS


def plan_one_ahead(batch: RunningBatch, block_tokens: int) -> PlanBuilder | None:
    """Plan one more token of every running answer that does not reach its length limit in the step in flight.

    Return None if that step's results are needed first: a prompt must be computed or admitted, a request reads its
    earlier tokens or samples several candidates, or blocks are short.
    """
    if batch.waiting:
        return None
    latest, pool = batch.in_flight.latest, batch.pool
    may_lack = len(batch.running) * pool.column_blocks > pool.available
    if latest.repeats and batch.running.are(latest.sequences) and not may_lack:
        return latest.repeated(block_tokens)
    place = {id(sequence): index for index, sequence in enumerate(latest.sequences)}
    continued, left_tokens = list[ScheduledSequence](), sys.maxsize
    for sequence in batch.running:
        request, tokens = sequence.request, len(sequence.token_ids)
        is_answer = tokens - sequence.computed_tokens == 1 and tokens > len(request.token_ids)
        if not (is_answer and request.params.drawn_alone):
            return None
        left = request.longest_tokens - tokens - (id(sequence) in place)
        if left:
            continued.append(sequence)
            left_tokens = min(left_tokens, left)
    # Next position to write; one later for a sequence that is in flight.
    writes = [Write(each.held(), each.computed_tokens + (id(each) in place)) for each in continued]
    if may_lack and blocks_to_write(writes, pool, block_tokens) > pool.available:
        return None
    draft = PlanBuilder(repeats=left_tokens - 1)
    for sequence, (table, position) in zip(continued, writes, strict=True):
        if position // block_tokens != table.own_column:
            draft.copies += table.grow(position, block_tokens)
        if id(sequence) in place:
            draft.follow(sequence, place[id(sequence)])
        else:
            draft.compute(sequence, budget_tokens=1)
    return draft


MAX_ORDERED = 256  # waiting prompts whose objectives are compared: ordering more would take longer than short steps
USUAL_WAIT_S = 0.002  # longest usual time from the end of a step to the plan of the next one
LANDING_DIVISOR = 8  # divisor of the prompt tokens of a step without answers while KV is being received


class Scheduler:
    """Scheduler of at most `max_sequences` choices, in steps of at most `max_step_tokens` tokens.

    A step always has one token of each running choice, even if it then exceeds the maximum.

    `budget` limits the prompt tokens in steps with answers. If a prompt is urgent (prompt_order.py), such a step may
    take as long as the strictest TBT objective of its answers allows. KV of preempted sequences is swapped to `swap` if
    all of it fits. `tail_tokens` is the maximum length of the last step of a `prefill_only` prompt that takes several
    steps (0: no limit). Earlier blocks are transferred during that step, so that only few remain after it.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_tokens: int,
        max_step_tokens: int,
        max_sequences: int,
        budget: StepBudget | None = None,
        swap: SwapSpace | None = None,
        tail_tokens: int = 0,
        speculation: Speculation | None = None,
        whole_prompts: bool = False,
        tbt_s: float = 0.0,
        answer_tokens: int = CHARGED_ANSWER_TOKENS,
        lent_gain: float = 0.0,
    ) -> None:
        """Start empty.

        `tbt_s`: TBT objective of answers without their own, in seconds; 0: no prompt is urgent. `whole_prompts`:
        compute each prompt in one step of any length and cache nothing of it, for a model whose tokens attend to later
        ones. `answer_tokens`: assumed length of an answer. It is admitted if older prompts find the blocks that they
        take in as many steps. `lent_gain`: by how much faster prompts may be computed with the cores of another worker,
        as a fraction of the rate without them.
        """
        self._whole_prompts = whole_prompts
        self.speculation = speculation
        self._drafting = None if speculation is None else Drafting(speculation, pool, block_tokens)
        self.batch = RunningBatch(
            pool, block_tokens, swap or SwapSpace(0), None if self._drafting is None else self._drafting.forget
        )
        self._beams = BeamGroups(self.batch)
        self._block_tokens = block_tokens
        self.max_step_tokens = max_step_tokens  # may change between two plans
        self._tail_tokens = tail_tokens
        self._max_sequences = max_sequences
        self._budget = budget
        self._tbt_s = tbt_s
        self._swap_slots = 0 if swap is None else swap.total_slots
        self._stalled: ScheduledSequence | None = None  # oldest prompt that lacked blocks when last tried
        self._foreseen_blocks = sys.maxsize  # blocks that prompts take while a new answer runs
        self._answer_tokens = answer_tokens
        self._received_s = math.inf  # earliest time at which the KV of an answer without a planned step was received
        self._began_s = self._ended_s = math.inf  # of the latest step, if it was not planned ahead
        self._lent = LentGain(lent_gain) if lent_gain else None
        self.wants_cores = False
        """Whether prompts need the cores of another worker, for their TTFT objectives, in the planned step."""

    def add(self, request: Request, cache_root: bytes | None = None) -> None:
        """Queue a prompt to compute here. Raises: RequestTooLong, RequestRefused.

        Blocks of prompt and answer are cached if the request has hashes or `cache_root` is given.
        """
        self._check(request)
        if self._whole_prompts:
            request, cache_root = replace(request, block_hashes=()), None
        self.batch.wait(self.batch.make(request, cache_root))

    def reserve(self, request: Request, cache_root: bytes | None = None) -> Reservation | None:
        """Reserve blocks for a prompt whose KV will be received, and one more block table column for its answer.

        Return None, without effect, if slots or blocks are short now or waiting requests claim them: the caller
        retries, in order of arrival, when a request has finished. Raises: RequestTooLong if the request can never fit;
        RequestRefused.
        """
        self._check(request)
        batch, groups, prompt_tokens = self.batch, self.pool.groups, len(request.token_ids)
        columns, first_live = blocks_for(prompt_tokens, self._block_tokens), groups.first_live(prompt_tokens)
        if batch.used_slots + batch.claimed_slots + request.params.places > self._max_sequences:
            return None
        sequence = batch.make(request, cache_root)
        left_blocks = batch.claimed_blocks + batch.outstanding_blocks(most_foreseen=self._foreseen_blocks)
        if not batch.reserve(sequence, min(columns + 1, self._most_columns(request)), left_blocks, first_live):
            return None
        cached_columns = sequence.computed_tokens // self._block_tokens
        blocks = sequence.held().held(0, columns, first_live)
        return Reservation(blocks, groups.blocks(cached_columns, first_live), sequence.computed_tokens)

    def activate(
        self, request_id: int, first: Sequence[FirstToken], received_s: float = math.inf
    ) -> list[SchedulerOutcome]:
        """Start the choices of a reserved prompt whose KV is complete and valid, and publish its blocks.

        `first`: first token of every choice; for a beam search, one token with its candidates in `top`. A choice that
        finishes with its first token never runs. `received_s`: time at which the KV was received, on the clock of
        `plan`: the answer waits for its second token since then, so the next step is shorter by this time. Return the
        answers of a beam search that ends with that token, otherwise an empty list. Raises: UnknownRequest, ValueError.
        """
        prompt = self.batch.reserved.get(request_id)
        if prompt is None:
            raise UnknownRequest(request_id)
        first = sorted(first, key=lambda token: token.choice)
        if [token.choice for token in first] != list(prompt.request.first_choices):
            raise ValueError(f"request {request_id}: needs one first token for each of {prompt.first_draws} choices")
        if not self.batch.running:
            self._ended_s = math.inf
        choices = self.batch.land(prompt)
        self._received_s = min(self._received_s, received_s)
        if prompt.request.params.beam is not None:
            return list(self._beams.take(prompt, first[0].top))
        for sequence, token in zip(choices, first, strict=True):
            self._append(sequence, token.token_id, token.end)
        return []

    def plan(self, now_s: float = 0.0) -> Plan | None:
        """Plan the next step; None if there is nothing to compute now. `now_s`: monotonic time, for TTFT objectives."""
        draft, self._began_s = PlanBuilder(), now_s
        favoured = self._make_room(draft)
        self._add_answers(draft, drafts=favoured is None)
        self._add_prompts(draft, now_s, favoured)
        while not draft.chunks and draft.short:
            oldest = draft.oldest_short
            if oldest is not None and oldest is not favoured and self.pool.available >= self.pool.column_blocks:
                favoured = oldest  # it takes a column that is reserved for growth, rather than that of another sequence
            elif (newest := self._giving_way(oldest)) is not None:
                draft.swaps_out += self.batch.preempt(newest)
            else:
                break
            draft.short.clear()
            self._add_prompts(draft, now_s, favoured)
        return self._begin(draft)

    def plan_ahead(self) -> Plan | None:
        """Plan the step after the one in flight; None if the step in flight must be committed first.

        At most two steps are in flight. Requests may arrive, be activated, finish and be aborted between the two plans.
        With speculation the result is always None: drafts need the tokens of the step in flight.
        """
        if self.speculation is not None:
            return None
        self._began_s = math.inf
        draft = plan_one_ahead(self.batch, self._block_tokens)
        return None if draft is None or not draft.chunks else self._begin(draft)

    def commit(self, plan: Plan, results: Sequence[ChunkResult]) -> list[SchedulerOutcome]:
        """Apply the results of the oldest in-flight step; `results` is parallel to its plan's chunks."""
        outcomes: list[SchedulerOutcome] = []
        sequences, ended = self.batch.in_flight.finish(), self.batch.in_flight.ended
        right: list[ScheduledSequence] = []  # sequence of each right draft
        block_tokens, windowed = self._block_tokens, self.pool.groups.windowed > 0
        for sequence, chunk, result in zip(sequences, plan.chunks, results, strict=True):
            if sequence.table is None or sequence in ended:
                continue  # the sequence ended after the plan
            if chunk.is_draft and not sequence.draws(chunk):
                continue  # the chunk follows a wrong draft
            if isinstance(result, NonFinite):
                if result.kv_suspect:
                    self.pool.distrust(sequence.table.blocks)
                self.abort(chunk.request_id)
                outcomes.append(RequestFailed(chunk.request_id, result.cause))
                continue
            if chunk.is_draft:
                right.append(sequence)
            try:
                if chunk.follows is None:
                    outcomes += self._taken(sequence, chunk, result)
                else:  # a token that `plan_one_ahead` planned: fast path of `_taken`
                    sequence.computed_tokens = end = chunk.start + 1
                    if windowed or not end % block_tokens:
                        sequence.publish(block_tokens)
                    outcomes.append(self._draw(sequence, result.drawn[0]))
            except BlockError:
                raise  # block accounting is broken: no request can be trusted
            except Exception as fault:  # noqa: BLE001 -- a fault of one request ends only that request
                self.abort(chunk.request_id)
                outcomes.append(RequestFailed(chunk.request_id, f"step failed: {type(fault).__name__}: {fault}"))
        if self._drafting is not None:
            drafted = [each for each, chunk in zip(sequences, plan.chunks, strict=True) if chunk.is_draft]
            self._drafting.judge(drafted, right)
        return outcomes

    def _taken(self, sequence: ScheduledSequence, chunk: Chunk, result: Computed) -> list[SchedulerOutcome]:
        """Apply the result of one chunk."""
        outcomes: list[SchedulerOutcome] = []
        if not sequence.made_tokens:
            outcomes.append(sequence.prompt_computed(chunk, result, self._block_tokens))
        sequence.computed_tokens = chunk.end - result.late
        if sequence.request.pooling is not None and not sequence.uncomputed_tokens:
            sequence.publish(self._block_tokens)
            self.batch.end(sequence)
        if not chunk.samples or result.late:
            return outcomes
        if sequence.request.prefill_only:
            self.batch.pin(sequence)
            return outcomes
        return outcomes + self._take(sequence, result)

    def observe(self, plan: Plan, duration_s: float, period_s: float = 0.0) -> None:
        """Record the time of a step, from which the next ones are sized; steps that swap blocks are ignored.

        `period_s`: time since the end of the previous step, which includes planning and handing out tokens; 0: unknown.
        """
        prompt_tokens, self._ended_s = plan.prompt_tokens, self._began_s + duration_s
        if self._budget is not None and plan.chunks and not (plan.swaps_out or plan.swaps_in):
            if self._lent is not None:
                rate = self._budget.rates(self.max_step_tokens).alone_tokens_per_s
                self._lent.observe(self.wants_cores, prompt_tokens / max(duration_s, 1e-9), rate)
                if self.wants_cores:
                    return
            self._budget.observe(plan.tokens - prompt_tokens, prompt_tokens, duration_s, period_s)
        if self.speculation is not None and plan.chunks and not (plan.swaps_out or plan.swaps_in or prompt_tokens):
            has_drafts = any(chunk.is_draft for chunk in plan.chunks)
            self.speculation.observe(len(plan.chunks), duration_s, has_drafts)

    def spare_s(self, now_s: float) -> float:
        """Return for how many seconds the next step may wait, so that its answers still meet their TBT objectives.

        0 if the step has prompts or a new answer, or if the time of such a step is not known.
        """
        running = self.batch.running
        answers = [each for each in running if each.is_answer]
        if not answers or len(answers) < len(running) or self.batch.waiting or self._budget is None:
            return 0.0
        if self._ended_s == math.inf or self._received_s < math.inf:
            return 0.0
        goal_s = self._goal_s(answers, len(answers)) - self._drafting_s
        return max(0.0, self._ended_s + self._budget.spare_s(len(answers), goal_s) - now_s)

    @property
    def prompt_rates(self) -> PromptRates:
        """Prefill rates without answers, and of urgent prompts next to answers; both None without a budget."""
        budget = self._budget
        return PromptRates(None, None) if budget is None else budget.rates(self.max_step_tokens, self._tbt_s)

    @property
    def settings(self) -> Mapping[str, float]:
        """Settings that decide what a step computes, by name; flags are 0 or 1."""
        return {
            "block_tokens": self._block_tokens,
            "max_step_tokens": self.max_step_tokens,
            "max_sequences": self._max_sequences,
            "tail_tokens": self._tail_tokens,
            "tbt_s": self._tbt_s,
            "lent_gain": 0.0 if self._lent is None else self._lent.most,
            "swap_slots": self._swap_slots,
            "total_blocks": self.pool.total_blocks,
            "whole_prompts": self._whole_prompts,
            "drafts": self.speculation is not None,
            "windows": self.pool.groups.windowed > 0,
        }

    def stop_choice(self, request_id: int, choice: int) -> bool:
        """Stop one choice that has started. Returns whether it was still being generated."""
        sequence = self.batch.requests.get(request_id, {}).get(choice)
        if sequence is None or not sequence.made_tokens or sequence.request.params.beam is not None:
            return False
        self.batch.end(sequence)
        return True

    def abort(self, request_id: int, landed_blocks: int = 0) -> bool:
        """Remove a request in any phase and free its blocks. Returns whether it existed.

        No copy into the blocks of a reserved request may be in flight: stop it first. `landed_blocks`:
        number of leading blocks of a reserved request whose KV was received; their complete columns stay cached.
        """
        self._beams.forget(request_id)
        reserved = self.batch.reserved.get(request_id)
        if reserved is not None and landed_blocks:
            self.batch.keep_landed(reserved, landed_blocks)
        sequences = tuple(self.batch.requests.get(request_id, {}).values())
        for sequence in sequences:
            self.batch.end(sequence)
        return bool(sequences)

    @property
    def pool(self) -> BlockPool:
        return self.batch.pool

    @property
    def counters(self) -> SchedulerCounters:
        return self.batch.counters

    @property
    def has_work(self) -> bool:
        """Return whether any request needs steps or has a reservation; pinned requests need no steps."""
        return len(self.batch.requests) > len(self.batch.pinned)

    def _begin(self, draft: PlanBuilder) -> Plan | None:
        plan = draft.finish()
        if plan is not None:
            self._received_s = math.inf
            self.batch.in_flight.begin(draft)
        return plan

    def _check(self, request: Request) -> None:
        check_request(request, self._block_tokens)
        if request.request_id in self.batch.requests:
            raise RequestRefused(f"request {request.request_id}: already exists")
        total, places, groups = self.pool.total_blocks, request.params.places, self.pool.groups
        most_blocks = groups.blocks if self._whole_prompts else groups.most_blocks
        if request.prefill_only:
            needed = most_blocks(blocks_for(len(request.token_ids), self._block_tokens))
            if needed > total:
                raise RequestTooLong(f"the prompt needs {needed} blocks; the pool has {total}")
            return
        needed = most_blocks(self._most_columns(request))
        if needed > total:
            raise RequestTooLong(f"a choice may need {needed} blocks; the pool has {total}")
        if places > self._max_sequences:
            raise RequestTooLong(f"the request needs {places} batch slots; there are {self._max_sequences}")
        if request.params.beam is not None and (all_beams := self.batch.blocks_at_once(places, needed)) > total:
            raise RequestTooLong(f"{places} beams may need {all_beams} blocks; the pool has {total}")

    def _most_columns(self, request: Request) -> int:
        """Return the block table columns of a choice of maximum length, without the last token: its KV is unused."""
        return blocks_for(request.longest_tokens - 1, self._block_tokens)

    def _drafted(self, answers: Sequence[ScheduledSequence]) -> Sequence[Sequence[int]]:
        """Return the tokens that each answer verifies in addition to its newest one."""
        if self._drafting is None or not answers:
            return [()] * len(answers)
        return self._drafting.drafts(answers, min(self.max_step_tokens, self._max_sequences))

    def _goal_s(self, answers: Sequence[ScheduledSequence], rows: int) -> float:
        """Return the maximum time of a step with an urgent prompt; 0: no prompt is urgent. `rows`: with drafts."""
        if self._budget is None or not self._tbt_s:
            return 0.0
        objectives = {each.request.objectives.tbt_s for each in answers}
        return self._budget.goal_s(rows, {self._tbt_s if each == math.inf else each for each in objectives})

    def _order(self, now_s: float, target_s: float | None) -> PromptOrder:
        """Order the prompts. `target_s`: maximum time of a step with urgent prompts; None: no answers run."""
        pending = [sequence for sequence in self.batch.running if sequence.is_prompt]
        pending += islice(self.batch.waiting, MAX_ORDERED)
        rates = AssumedRates() if self._budget is None or not pending else self._rates(self._budget, target_s)
        aim_share = AIM_SHARE if self._lent is None else LENT_SHARE
        return order_prompts(pending, now_s, rates, self._max_sequences - self.batch.used_slots, aim_share)

    def _rates(self, budget: StepBudget, target_s: float | None) -> AssumedRates:
        """Return the assumed rates. `target_s`: see `_order`."""
        free = budget.rates(self.max_step_tokens)
        if target_s is not None:
            full = budget.rates(self.max_step_tokens, target_s).beside_tokens_per_s
            return AssumedRates(full or math.inf, free.beside_tokens_per_s or math.inf)
        alone = free.alone_tokens_per_s or math.inf
        if self._lent is None:
            return AssumedRates(alone, free.beside_tokens_per_s or math.inf)
        return AssumedRates(alone * (1.0 + self._lent.gain), alone)

    def _prefill_budget(self, decode_tokens: int, target_s: float) -> int:
        """Return the maximum number of prompt tokens. `target_s`: maximum step time if a prompt is urgent, else 0."""
        left = max(0, self.max_step_tokens - decode_tokens)
        if self._budget is None:
            return left
        if decode_tokens == 0:  # no answer waits for the step, except those whose KV is being received
            most = max(1, left // LANDING_DIVISOR) if self.batch.reserved else left
            return min(most, self._budget.alone_tokens(left))
        return self._budget.prompt_tokens(decode_tokens, left, self._drafting_s, target_s)

    @property
    def _drafting_s(self) -> float:
        return 0.0 if self.speculation is None else self.speculation.drafting_s

    def _waited_s(self, now_s: float) -> float:
        """Return how long answers have waited for the step planned at `now_s`, if longer than between usual steps."""
        waited_s = now_s - min(self._received_s, self._ended_s)
        return waited_s if waited_s > USUAL_WAIT_S else 0.0

    def _make_room(self, draft: PlanBuilder) -> ScheduledSequence | None:
        """Preempt the newest sequences until every running answer can grow by a token, and the stalled prompt too.

        Return the prompt that blocks were released for, if any. Only sequences that are younger than it are preempted
        for it. Call this before the first copy is planned, so that no source block of a copy is released and reused.
        The oldest sequence is preempted only for transfers and `prefill_only` prompts, which finish in bounded time.
        """
        batch, stalled = self.batch, self._stalled
        if stalled is not None and stalled not in batch.running:
            stalled = None
        while self._lacks_blocks(stalled):
            newest = batch.newest_preemptible()
            if stalled is not None and (newest is None or newest.arrival_key <= stalled.arrival_key):
                stalled = None
                continue
            if newest is None or (len(batch.running) == 1 and not batch.holds_for_transfers):
                raise BlockError("the oldest sequence does not fit the pool: another owner takes its blocks")
            draft.swaps_out += batch.preempt(newest)
        return stalled

    def _lacks_blocks(self, stalled: ScheduledSequence | None) -> bool:
        """Return whether an answer cannot grow by a token, or the `stalled` prompt by a column. Cheap in most cases."""
        running, pool = self.batch.running, self.pool
        if len(running) * pool.column_blocks <= pool.available:
            return False
        wanted = wanted_blocks(running, pool, self._block_tokens) + (0 if stalled is None else pool.column_blocks)
        return wanted > pool.available and not (self.batch.relieve() and wanted <= pool.available)

    def _giving_way(self, oldest_short: ScheduledSequence | None) -> ScheduledSequence | None:
        """Return the sequence to preempt if prompts lack blocks and nothing else can be computed; None to wait.

        The newest is preempted for an older one, and for `prefill_only` prompts unless transfers will release blocks:
        once all others are preempted, one of these finds all that it needs (`RunningBatch.grow`).
        """
        batch, newest = self.batch, self.batch.newest_preemptible()
        if newest is not None and oldest_short is not None and newest.arrival_key > oldest_short.arrival_key:
            return newest
        if batch.holds_for_transfers:
            return None
        if newest is None or len(batch.running) == 1:
            raise BlockError("the oldest prompt does not fit the pool: another owner takes its blocks")
        return newest

    def _add_answers(self, draft: PlanBuilder, drafts: bool) -> None:
        """Add the newest token of every running answer. `drafts`: with drafted tokens, which may need blocks, too."""
        answers = [sequence for sequence in self.batch.running if sequence.is_answer]
        drafted_tokens = self._drafted(answers) if drafts else [()] * len(answers)
        for sequence, drafted in zip(answers, drafted_tokens, strict=True):
            draft.copies += sequence.held().grow(sequence.computed_tokens, self._block_tokens)
            draft.compute(sequence, budget_tokens=1)
            for length in range(1, len(drafted) + 1):
                draft.copies += sequence.held().grow(sequence.computed_tokens + length, self._block_tokens)
                draft.guess(sequence, drafted[:length])

    def _add_prompts(self, draft: PlanBuilder, now_s: float, favoured: ScheduledSequence | None) -> None:
        """Add prompt tokens next to the answers in `draft`. `favoured`: see `RunningBatch.grow`."""
        rows = len(draft.chunks)
        goal_s = self._goal_s(draft.sequences, rows)
        order = self._order(now_s, goal_s if rows else None)
        target_s = max(0.0, goal_s - self._waited_s(now_s)) if order.urgent else 0.0
        self.wants_cores = order.urgent and self._lent is not None
        budget_tokens = self._prefill_budget(rows, target_s)
        may_compute = budget_tokens > 0
        if may_compute:
            columns = blocks_for(self._answer_tokens * budget_tokens, self._block_tokens)
            self._foreseen_blocks = self.pool.groups.blocks(columns)
        prompts = self._prompts(order, draft)
        while budget_tokens > 0 and (prompt := next(prompts, None)) is not None:
            if self._whole_prompts and prompt.uncomputed_tokens > budget_tokens:
                if draft.chunks:
                    break  # the prompt needs a step without other chunks
                budget_tokens = prompt.uncomputed_tokens
            most_tokens = min(self._without_tail(prompt, budget_tokens), prompt.uncomputed_tokens)
            tokens = self.batch.grow(prompt, most_tokens, prompt is favoured)
            if tokens < most_tokens:
                draft.short.append(prompt)
            if tokens == 0:
                continue
            budget_tokens -= draft.compute(prompt, tokens)
            if self._budget is not None and rows == 0 and draft.chunks[-1].end == len(prompt.token_ids):
                computed = sum(len(chunk.token_ids) for chunk in draft.chunks)
                budget_tokens = min(budget_tokens, self._budget.after_completed(computed, self._tbt_s))
        if may_compute:
            self._stalled = draft.oldest_short
        order.overtaken(zip(draft.sequences[rows:], draft.chunks[rows:], strict=True))

    def _prompts(self, order: PromptOrder, draft: PlanBuilder) -> Iterator[ScheduledSequence]:
        """Iterate over prompts to compute, in order. A waiting prompt is admitted first, if it fits and none is short.

        It must leave older prompts the blocks that they take while its answer is assumed to run. A `prefill_only`
        prompt need not: it releases its blocks soon after its last chunk.
        """

        def admit(sequence: ScheduledSequence) -> bool:
            if draft.short:
                return False
            left_blocks = 0
            if not sequence.request.prefill_only:
                left_blocks = self.batch.outstanding_blocks(sequence.arrival_key, self._foreseen_blocks)
            swaps = self.batch.admit(sequence, self._max_sequences, left_blocks, self._whole_prompts)
            draft.swaps_in += swaps or ()
            return swaps is not None

        return admitted(order.prompts, self.batch.is_coming, admit)

    def _without_tail(self, prompt: ScheduledSequence, budget_tokens: int) -> int:
        """Return the maximum number of a prompt's tokens to compute now, without the tail if it gets its own step."""
        began = prompt.computed_tokens > (prompt.cached_tokens or 0)
        fits = 0 < self._tail_tokens < prompt.uncomputed_tokens <= budget_tokens
        if self._whole_prompts or not (prompt.request.prefill_only and began and fits):
            return budget_tokens
        before_tail = blocks_for(len(prompt.token_ids) - self._tail_tokens, self._block_tokens) * self._block_tokens
        return before_tail - prompt.computed_tokens

    def _take(self, sequence: ScheduledSequence, computed: Computed) -> list[SchedulerOutcome]:
        """Apply one sampled token to each choice of the sequence."""
        if sequence.choices == 1:
            sequence.publish(self._block_tokens)
            choices = [sequence]
        else:
            choices = self.batch.split(sequence)
        if sequence.request.params.beam is not None:
            return list(self._beams.take(sequence, computed.drawn[0].top))
        return [self._draw(choice, drawn) for choice, drawn in zip(choices, computed.drawn, strict=True)]

    def _draw(self, sequence: ScheduledSequence, drawn: Drawn) -> TokenMade:
        request, token_id = sequence.request, drawn.token_id
        offset = len(sequence.token_ids) - sequence.prompt_tokens
        end = end_reason(request.params, token_id, offset)
        self._append(sequence, token_id, end)
        choice, cached_tokens = sequence.arrival_key.choice, sequence.cached_tokens or 0
        return tuple.__new__(TokenMade, (request.request_id, choice, offset, drawn, end, cached_tokens))

    def _append(self, sequence: ScheduledSequence, token_id: int, end: EndReason | None) -> None:
        sequence.token_ids.append(token_id)
        if end is not None:
            self.batch.end(sequence)
