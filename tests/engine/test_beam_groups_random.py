"""Beam searches among other requests, aborts at any time, pools of a few blocks: always an end, always the same.

The seeds are fixed; a failure names the one to look at.
"""

import random
from dataclasses import dataclass, field

import pytest

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.swap_space import SwapSpace
from baton.engine.request import Request, RequestTooLong
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from tests.engine.test_beam_groups import BLOCK, ROOT, STOPS, Machine, answers_of, beam_request, collect

REQUESTS, STEPS = 8, 400


@dataclass
class Life:
    """One scheduler from its first request to its last."""

    draw: random.Random
    asked: dict[int, Request] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    answers: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        blocks, slots = self.draw.randrange(6, 40), self.draw.choice((0, 0, 3, 50))
        step_tokens, sequences = self.draw.choice((4, 16, 64)), self.draw.choice((4, 8, 32))
        self.scheduler = Scheduler(BlockPool(blocks), BLOCK, step_tokens, sequences, swap=SwapSpace(slots))

    def run(self) -> None:
        machine, left = Machine(), list(range(REQUESTS))
        for _ in range(STEPS):
            if left and self.draw.random() < 0.3:
                self.ask(left.pop())
            self.perhaps_abort()
            plan = self.scheduler.plan()
            if plan is None:
                assert not self.scheduler.has_work, "somebody waits, and nothing can be done"
                if not left:
                    return
                continue
            self.perhaps_abort()
            collect(self.scheduler.commit(plan, machine.run(plan)), self.answers)
            self.scheduler.pool.check_conservation()
        raise AssertionError("there is no end to it")

    def ask(self, request_id: int) -> None:
        draw = self.draw
        width, max_tokens = draw.randrange(1, 5), draw.randrange(1, 14)
        params = beam_request(0, width, max_tokens, n=draw.randrange(1, width + 1)).params
        if draw.random() < 0.4:
            params = SamplingParams(max_tokens, stop_token_ids=STOPS, n=draw.randrange(1, 4), logprobs=3)
        prompt = tuple(draw.randrange(40) for _ in range(draw.randrange(1, 14)))
        request = Request(request_id, prompt, params, ())
        try:
            self.scheduler.add(request, draw.choice((ROOT, None)))
        except RequestTooLong:
            return
        self.asked[request_id] = request

    def perhaps_abort(self) -> None:
        if self.asked and self.draw.random() < 0.02:
            request_id = self.draw.choice(sorted(self.asked))
            self.scheduler.abort(request_id)
            self.aborted.add(request_id)

    def check(self) -> None:
        assert self.scheduler.pool.counts.held == 0
        for request in self.asked.values():
            if request.params.beam is not None and request.request_id not in self.aborted:
                choices = range(request.params.n)
                assert [self.answers[request.request_id, choice] for choice in choices] == answers_of(request)


@pytest.mark.parametrize("first_seed", range(0, 60, 20))
def test_every_search_ends_with_its_answers_and_nothing_is_held(first_seed: int) -> None:
    preemptions = 0
    for seed in range(first_seed, first_seed + 20):
        life = Life(random.Random(seed))
        life.run()
        life.check()
        preemptions += life.scheduler.counters.preemptions
    assert preemptions > 0
