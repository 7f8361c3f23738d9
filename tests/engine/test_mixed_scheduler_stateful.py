"""Random requests on a pool of a few blocks, each block remembering the tokens whose KV it holds.

The "model" draws a token that is a function of everything before it and of the choice. So an answer that went through
preemption, sharing and copies must still be the one that the function gives, and no request may be starved.
"""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.hashing import cache_root
from engine.mixed_scheduler import MixedScheduler
from engine.mixed_state import MixedOutcome, RequestFailed
from engine.pages import BlockPool
from engine.plan import Chunk, ChunkResult, Drawn, NonFinite, Plan
from engine.sampling_params import SamplingParams
from engine.sequence import Request, RequestTooLong, end_reason

BLOCK, TOTAL, SLOTS, STEP_TOKENS, STOP = 2, 7, 4, 5, 9
ROOT = cache_root(b"model", "float32")
MOST_STEPS = 400  # until everything asked for is answered


def next_token(tokens: list[int], choice: int) -> int:
    return (sum((place + 3) * token for place, token in enumerate(tokens)) + choice) % (STOP + 1)


def answer(request: Request, choice: int) -> list[int]:
    tokens = list(request.token_ids)
    made: list[int] = []
    while not made or end_reason(request.params, made[-1], len(made) - 1) is None:
        made.append(next_token([*tokens, *made], choice))
    return made


class MixedLives(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.scheduler = MixedScheduler(self.pool, BLOCK, STEP_TOKENS, SLOTS)
        self.requests: dict[int, Request] = {}
        self.made: dict[int, dict[int, list[int]]] = {}
        self.ended: dict[int, set[int]] = {}
        self.memory: dict[int, list[int]] = {}  # the whole sequence, up to each block's newest token
        self.asked = 0

    @rule(
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple),
        max_tokens=st.integers(1, 8),
        n=st.integers(1, 3),
        cached=st.booleans(),
    )
    def add(self, token_ids: tuple[int, ...], max_tokens: int, n: int, cached: bool) -> None:
        self.asked += 1
        params = SamplingParams(max_tokens=max_tokens, n=n, stop_token_ids=frozenset({STOP}))
        request = Request(self.asked, token_ids, params, ())
        try:
            self.scheduler.add(request, ROOT if cached else None)
        except RequestTooLong:
            assert -(-(len(token_ids) + max_tokens - 1) // BLOCK) > TOTAL
            return
        self.requests[self.asked] = request
        self.made[self.asked] = {choice: [] for choice in range(n)}
        self.ended[self.asked] = set()

    @rule(fails=st.integers(0, 30), aborts=st.integers(0, 12))
    def step(self, fails: int, aborts: int) -> None:
        """`fails` and `aborts`: index of a chunk that is not finite, or whose request is aborted during the step."""
        plan = self.scheduler.plan()
        assert (plan is None) == (not self.requests), "there is work, and nothing is planned"
        if plan is None:
            return
        results = self.compute(plan)
        if aborts < len(plan.chunks):
            self.forget(plan.chunks[aborts].request_id)
        if fails < len(plan.chunks):
            results[fails] = NonFinite()
        for outcome in self.scheduler.commit(plan, results):
            self.take(outcome)

    def compute(self, plan: Plan) -> list[ChunkResult]:
        sources = {copy.source for copy in plan.copies}
        destinations = [copy.destination for copy in plan.copies]
        assert len(set(destinations)) == len(destinations) and not sources & set(destinations)
        for copy in plan.copies:
            self.memory[copy.destination] = list(self.memory[copy.source])
        assert sum(len(chunk.token_ids) for chunk in plan.chunks) <= max(STEP_TOKENS, len(plan.chunks))
        return [self.write(chunk) for chunk in plan.chunks]

    def write(self, chunk: Chunk) -> ChunkResult:
        """What a model would do: reads the KV before the chunk, writes the chunk's, draws from all of it."""
        tokens: list[int] = []
        for position in range(chunk.start):
            block = chunk.block_table[position // BLOCK]
            tokens = self.memory[block][: position + 1]
            assert len(tokens) == position + 1, "KV is read that is not written"
        prompt = list(self.requests[chunk.request_id].token_ids)
        tokens += chunk.token_ids
        assert tokens[: len(prompt)] == prompt[: len(tokens)], "KV of another sequence"
        for position in range(chunk.start, chunk.end):
            block = chunk.block_table[position // BLOCK]
            assert self.pool.references(block) == 1, "a shared block is written"
            self.memory[block] = tokens[: position + 1]
        return tuple(Drawn(next_token(tokens, sample.choice), 0.0) for sample in chunk.samples)

    def take(self, outcome: MixedOutcome) -> None:
        if isinstance(outcome, RequestFailed):
            del self.requests[outcome.request_id]
            return
        request = self.requests[outcome.request_id]
        made = self.made[outcome.request_id][outcome.choice]
        assert outcome.offset == len(made), "a token is lost or repeated"
        made.append(outcome.drawn.token_id)
        assert made == answer(request, outcome.choice)[: len(made)], "preemption changed an answer"
        assert outcome.cached_tokens < len(request.token_ids)
        if outcome.end is not None:
            assert made == answer(request, outcome.choice)
            self.end(outcome.request_id, outcome.choice)

    def end(self, request_id: int, choice: int) -> None:
        self.ended[request_id].add(choice)
        if len(self.ended[request_id]) == self.requests[request_id].params.n:
            del self.requests[request_id]

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.forget(data.draw(st.integers(1, self.asked)))

    def forget(self, request_id: int) -> None:
        assert self.scheduler.abort(request_id) is (self.requests.pop(request_id, None) is not None)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def stop_choice(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        choice = data.draw(st.integers(0, 2))
        begun = bool(self.made[request_id].get(choice)) and choice not in self.ended[request_id]
        assert self.scheduler.stop_choice(request_id, choice) is begun
        if begun:
            self.end(request_id, choice)

    @invariant()
    def pages_are_conserved(self) -> None:
        self.pool.check_conservation()
        assert self.scheduler.running_sequences <= SLOTS
        assert self.pool.counts.held == 0 or self.requests
        assert self.scheduler.has_work is bool(self.requests)
        assert self.scheduler.unfilled_slots <= self.pool.counts.held * BLOCK

    def teardown(self) -> None:
        """Whatever happened, everything asked for is answered in the end."""
        for _ in range(MOST_STEPS):
            if not self.requests:
                break
            self.step(fails=99, aborts=99)
        assert not self.requests, "a deadlock"
        self.pool.check_conservation()
        assert self.pool.counts.held == 0


TestMixedLives = MixedLives.TestCase
TestMixedLives.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
