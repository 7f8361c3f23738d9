"""Random requests on a small pool, each block remembering the tokens whose KV it holds: blocks never run out
mid-answer, no choice reads another's tokens, and nothing is lost."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.decode_scheduler import DecodeRequest, DecodeScheduler, Reservation
from engine.pages import BlockPool
from engine.plan import Chunk, Drawn, NonFinite
from engine.sampling_params import SamplingParams
from engine.sequence import EndReason, FirstToken, RequestTooLong, end_reason

BLOCK, TOTAL, SLOTS, STOP = 2, 10, 4, 9


class DecodeLives(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.scheduler = DecodeScheduler(self.pool, BLOCK, SLOTS)
        self.reserved: dict[int, tuple[DecodeRequest, Reservation]] = {}
        self.answers: dict[int, dict[int, list[int]]] = {}  # tokens of each live choice, the prompt's first
        self.params: dict[int, SamplingParams] = {}
        self.prompt_tokens: dict[int, int] = {}
        self.memory: dict[int, list[int]] = {}  # the whole sequence, up to each block's newest token
        self.asked = 0

    @rule(
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=8).map(tuple),
        max_tokens=st.integers(1, 8),
        n=st.integers(1, 3),
    )
    def reserve(self, token_ids, max_tokens, n):
        self.asked += 1
        hashes = tuple(bytes(token_ids[: end + BLOCK]) for end in range(0, len(token_ids) - BLOCK + 1, BLOCK))
        params = SamplingParams(max_tokens=max_tokens, n=n, stop_token_ids=frozenset({STOP}))
        request = DecodeRequest(self.asked, token_ids, params, hashes)
        try:
            reservation = self.scheduler.reserve(request)
        except RequestTooLong:
            return
        if reservation is None:
            assert self.reserved or self.answers, "an empty worker has room"
            return
        for index, block in enumerate(reservation.blocks[: reservation.cached_blocks]):
            assert self.memory[block] == list(token_ids[: (index + 1) * BLOCK])
        self.reserved[self.asked] = (request, reservation)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def land(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.reserved)))
        request, reservation = self.reserved.pop(request_id)
        for index, block in enumerate(reservation.blocks):
            if index >= reservation.cached_blocks:
                assert self.pool.references(block) == 1, "a shared block is copied into"
                self.memory[block] = list(request.token_ids[: (index + 1) * BLOCK])
        tokens = data.draw(
            st.lists(st.sampled_from([5, 6, STOP]), min_size=request.params.n, max_size=request.params.n)
        )
        first = [FirstToken(i, token, 0.0, end_reason(request.params, token, 0)) for i, token in enumerate(tokens)]
        self.scheduler.activate(request_id, first)
        live = {token.choice: [*request.token_ids, token.token_id] for token in first if token.end is None}
        if live:
            self.answers[request_id] = live
            self.params[request_id] = request.params
            self.prompt_tokens[request_id] = len(request.token_ids)

    @rule(tokens=st.lists(st.sampled_from([5, 6, STOP, None]), min_size=SLOTS, max_size=SLOTS), aborts=st.booleans())
    def step(self, tokens, aborts):
        plan = self.scheduler.plan()
        assert (plan is None) == (not self.answers)
        if plan is None:
            return
        assert [chunk.request_id for chunk in plan.chunks] == [i for i, live in self.answers.items() for _ in live]
        for copy in plan.copies:
            self.memory[copy.destination] = list(self.memory[copy.source])
        for chunk in plan.chunks:
            self.write(chunk)
        if aborts:
            self.forget(plan.chunks[-1].request_id)
        results = [NonFinite() if t is None else (Drawn(t, 0.0),) for t in tokens[: len(plan.chunks)]]
        for made in self.scheduler.commit(plan, results):
            if made.failed:
                del self.answers[made.request_id]
                continue
            live = self.answers[made.request_id]
            assert made.offset == len(live[made.choice]) - self.prompt_tokens[made.request_id]
            live[made.choice].append(made.token_id)
            self.end_where_due(live, made.request_id, made.choice, made.end)

    def end_where_due(self, live: dict[int, list[int]], request_id: int, choice: int, end: EndReason | None) -> None:
        made_tokens = len(live[choice]) - self.prompt_tokens[request_id]
        full = made_tokens == self.params[request_id].max_tokens
        assert (end is not None) == (live[choice][-1] == STOP or full)
        if end is not None:
            del live[choice]
        if not live:
            del self.answers[request_id]

    def write(self, chunk: Chunk) -> None:
        """What a model would do: checks the KV of all tokens before this one, then writes this one's."""
        tokens = self.answers[chunk.request_id][chunk.samples[0].choice]
        assert [chunk.start, *chunk.token_ids] == [len(tokens) - 1, tokens[-1]]
        for position in range(chunk.start):
            block = chunk.block_table[position // BLOCK]
            assert self.memory[block][: position + 1] == tokens[: position + 1], "KV of another sequence"
        block = chunk.block_table[chunk.start // BLOCK]
        assert self.pool.references(block) == 1, "a shared block is written"
        self.memory[block] = list(tokens)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data):
        self.forget(data.draw(st.integers(1, self.asked)))

    def forget(self, request_id: int) -> None:
        known = request_id in self.reserved or request_id in self.answers
        assert self.scheduler.abort(request_id) is known
        self.reserved.pop(request_id, None)
        self.answers.pop(request_id, None)

    @invariant()
    def pages_are_conserved_and_promises_kept(self):
        self.pool.check_conservation()
        held, scheduler = self.pool.counts.held, self.scheduler
        assert held <= scheduler.committed_blocks <= TOTAL
        assert scheduler.held_by_sequences + scheduler.held_by_transfers == held
        assert scheduler.running_sequences == sum(map(len, self.answers.values()))
        assert scheduler.running_sequences <= scheduler.used_slots <= SLOTS
        assert held == 0 or self.reserved or self.answers


TestDecodeLives = DecodeLives.TestCase
TestDecodeLives.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
