"""Random arrivals, steps, failures, releases and aborts on a small pool. A block remembers the prompt written to it."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.request import Chunk, Computed, Drawn, NonFinite, Request, RequestTooLong, blocks_for
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.batch import IncomingPrefix
from baton.engine.scheduler.sequences import PromptComputed, RequestFailed
from tests.fixtures.prefill import prefill_request, prefill_scheduler

BLOCK, TOTAL, CHUNK = 2, 6, 5


class PrefillLives(RuleBasedStateMachine):
    tail_tokens = 0

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.scheduler = prefill_scheduler(self.pool, BLOCK, CHUNK, self.tail_tokens)
        self.unfinished: dict[int, Request] = {}
        self.readable: dict[int, list[int]] = {}
        self.pinned: set[int] = set()
        self.memory: dict[int, tuple[int, ...]] = {}  # the whole prefix, up to each block's newest token
        self.landings: list[IncomingPrefix] = []
        self.added = 0

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple), n=st.integers(1, 2))
    def add(self, token_ids, n):
        self.added += 1
        hashes = tuple(bytes(token_ids[: end + BLOCK]) for end in range(0, len(token_ids) - BLOCK + 1, BLOCK))
        request = prefill_request(self.added, token_ids, SamplingParams(max_tokens=3, n=n), hashes)
        try:
            self.scheduler.add(request)
        except RequestTooLong:
            assert blocks_for(len(token_ids), BLOCK) > TOTAL
            return
        self.unfinished[self.added] = request
        self.readable[self.added] = []

    @rule(fails=st.sets(st.integers(0, 4)), aborts=st.booleans())
    def step(self, fails, aborts):
        plan = self.scheduler.plan()
        if plan is None:
            assert self.pinned or self.landings or not self.unfinished, "work was left though nothing is pinned"
            return
        assert sum(len(chunk.token_ids) for chunk in plan.chunks) <= CHUNK
        results = []
        for index, chunk in enumerate(plan.chunks):
            self.write(chunk)
            bad = index in fails and chunk.samples
            results.append(NonFinite() if bad else Computed(tuple(Drawn(5, 0.0) for _ in chunk.samples)))
        if aborts:
            self.forget(plan.chunks[0].request_id)
        for progress in self.scheduler.commit(plan, results):
            self.take_in(progress)

    def write(self, chunk: Chunk) -> None:
        """What a model would do: reads all before the chunk, writes the chunk's tokens."""
        prompt = self.unfinished[chunk.request_id].token_ids
        assert tuple(chunk.token_ids) == prompt[chunk.start : chunk.end]
        for position in range(chunk.end):
            block, written = chunk.block_table[position // BLOCK], prompt[: position + 1]
            if position >= chunk.start:
                assert self.pool.references(block) == 1, "a shared block is written"
                self.memory[block] = written
            else:
                assert self.memory[block][: position + 1] == written, "the KV before this chunk is not its own"

    def take_in(self, progress: PromptComputed | RequestFailed) -> None:
        request = self.unfinished[progress.request_id]
        if isinstance(progress, RequestFailed):
            del self.unfinished[progress.request_id]
            return
        blocks = self.readable[progress.request_id]
        blocks.extend(progress.new_blocks)
        done = progress.first is not None
        assert len(blocks) == (blocks_for(len(request.token_ids), BLOCK) if done else progress.computed_tokens // BLOCK)
        if done:
            assert [token.choice for token in progress.first] == list(range(request.params.n))
            for index, block in enumerate(blocks):
                assert self.memory[block] == request.token_ids[: (index + 1) * BLOCK]
            del self.unfinished[progress.request_id]
            self.pinned.add(progress.request_id)

    @rule(blocks=st.integers(1, TOTAL), token=st.integers(0, 1), worthwhile=st.booleans())
    def land(self, blocks, token, worthwhile):
        """Blocks of prompts of one token over and over, which `add` makes too."""
        hashes = [bytes([token] * BLOCK * (index + 1)) for index in range(blocks)]
        before = self.pool.counts.held
        incoming = self.scheduler.batch.begin_fetch(hashes, lambda lacking: worthwhile and 0 < lacking <= blocks)
        if incoming is None:
            assert self.pool.counts.held == before
            return
        assert worthwhile and incoming.cached_blocks < len(incoming.blocks) == blocks
        for index, block in enumerate(incoming.blocks):
            if index < incoming.cached_blocks:
                assert self.memory[block] == tuple(hashes[index])
            else:
                assert self.pool.references(block) == 1
                self.memory[block] = tuple(hashes[index])
        self.landings.append(incoming)

    @precondition(lambda self: self.landings)
    @rule(data=st.data())
    def landed(self, data):
        incoming = self.landings.pop(data.draw(st.integers(0, len(self.landings) - 1)))
        valid = data.draw(st.integers(0, len(incoming.blocks)))
        for block in incoming.blocks[max(valid, incoming.cached_blocks) :]:
            self.memory[block] = ()  # garbage, which nobody may ever find
        self.scheduler.batch.end_fetch(incoming, valid)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def release(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.pinned)))
        self.pinned.remove(request_id)
        assert self.scheduler.abort(request_id)

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def abort(self, data):
        self.forget(data.draw(st.integers(1, self.added)))

    def forget(self, request_id: int) -> None:
        known = request_id in self.unfinished or request_id in self.pinned
        assert self.scheduler.abort(request_id) is known
        self.unfinished.pop(request_id, None)
        self.pinned.discard(request_id)

    @invariant()
    def pages_are_conserved(self):
        self.pool.check_conservation()
        counts, scheduler = self.pool.counts, self.scheduler.batch
        assert scheduler.held_by_sequences + scheduler.held_by_transfers == counts.held
        assert len(scheduler.waiting) + scheduler.running_sequences == len(self.unfinished)
        if not self.unfinished and not self.pinned and not self.landings:
            assert counts.held == 0
            assert scheduler.pending_tokens == 0


class PrefillLivesWithTails(PrefillLives):
    tail_tokens = 3


TestPrefillLives = PrefillLives.TestCase
TestPrefillLivesWithTails = PrefillLivesWithTails.TestCase
TestPrefillLivesWithTails.settings = TestPrefillLives.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None
)
