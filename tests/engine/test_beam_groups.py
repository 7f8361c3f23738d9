"""Beams on pages, over a memory that is simulated token by token: their answers are those of beam search alone."""

import math
import random

import pytest

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.swap_space import SwapSpace
from baton.engine.request import Computed, Drawn, FirstToken, NonFinite, Plan, Request, RequestTooLong, TokenLogprob
from baton.engine.sampling.params import SamplingParams, candidates_per_beam
from baton.engine.scheduler.beam_search import BeamSearch
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import RequestFailed, SchedulerOutcome, TokenMade
from baton.text.sampling import BeamParams

BLOCK = 4
STOPS = frozenset({1, 2})
ROOT = b"r" * 32


def likeliest_after(tokens: list[int], count: int) -> tuple[TokenLogprob, ...]:
    """A made-up model: every sequence of tokens has its own next ones."""
    draw = random.Random(repr(tokens))
    logprobs = sorted((math.log(1.0 - draw.random()) for _ in range(count)), reverse=True)
    return tuple(map(TokenLogprob, draw.sample(range(40), count), logprobs))


def beam_request(request_id: int, width: int, max_tokens: int, n: int = 1) -> Request:
    params = SamplingParams(
        max_tokens, stop_token_ids=STOPS, n=n, beam=BeamParams(width), logprobs=candidates_per_beam(width, STOPS)
    )
    return Request(request_id, tuple(range(5, 12 + request_id)), params, ())


def answers_of(request: Request) -> list[list[int]]:
    """What beam search alone makes of the same model."""
    params = request.params
    assert params.beam is not None
    search, beams = BeamSearch(params.beam, params.max_tokens, STOPS), [list(request.token_ids)]
    while not search.done:
        going_on = search.advance([likeliest_after(beam, params.logprobs) for beam in beams])
        beams = [[*beams[each.parent], each.token.token_id] for each in going_on]
    return [[token.token_id for token in each.tokens] for each in search.hypotheses[: params.n]]


class Machine:
    """Carries out plans on blocks that hold token ids in place of KV; other blocks hold nothing."""

    def __init__(self) -> None:
        self._pool: dict[int, list[int | None]] = {}
        self._host: dict[int, list[int | None]] = {}

    def run(self, plan: Plan) -> list[Computed]:
        for out in plan.swaps_out:
            self._host[out.host_slot] = list(self._pool[out.block])
        for back in plan.swaps_in:
            self._pool[back.block] = list(self._host[back.host_slot])
        for copy in plan.copies:
            self._pool[copy.destination] = list(self._pool[copy.source])
        for chunk in plan.chunks:
            for position, token_id in enumerate(chunk.token_ids, chunk.start):
                block = chunk.block_table[position // BLOCK]
                self._pool.setdefault(block, [None] * BLOCK)[position % BLOCK] = token_id
        results = []
        for chunk in plan.chunks:
            read = [self._pool[chunk.block_table[place // BLOCK]][place % BLOCK] for place in range(chunk.end)]
            known = [token_id for token_id in read if token_id is not None]
            assert len(known) == chunk.end
            drawn = tuple(Drawn(0, 0.0, likeliest_after(known, each.params.logprobs)) for each in chunk.samples)
            results.append(Computed(drawn))
        return results


def run_to_end(scheduler: Scheduler) -> dict[tuple[int, int], list[int]]:
    machine, answers = Machine(), dict[tuple[int, int], list[int]]()
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        collect(scheduler.commit(plan, machine.run(plan)), answers)
        scheduler.pool.check_conservation()
    assert scheduler.pool.counts.held == 0
    return answers


def collect(outcomes: list[SchedulerOutcome], answers: dict[tuple[int, int], list[int]]) -> None:
    for made in outcomes:
        if isinstance(made, TokenMade):
            answer = answers.setdefault((made.request_id, made.choice), [])
            assert made.offset == len(answer)
            answer.append(made.drawn.token_id)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(("blocks", "swap_slots"), [(200, 0), (23, 0), (22, 0), (22, 6), (22, 100)])
def test_answers_do_not_depend_on_preemption(blocks: int, swap_slots: int, cached: bool) -> None:
    requests = [beam_request(0, 4, 12, n=4), beam_request(1, 3, 15, n=2), beam_request(2, 4, 9)]
    scheduler = Scheduler(BlockPool(blocks), BLOCK, 16, 32, swap=SwapSpace(swap_slots))
    for request in requests:
        scheduler.add(request, ROOT if cached else None)
    found = run_to_end(scheduler)
    expected = [
        (each.request_id, choice, tokens) for each in requests for choice, tokens in enumerate(answers_of(each))
    ]
    assert found == {(request_id, choice): tokens for request_id, choice, tokens in expected}
    assert (scheduler.counters.preemptions > 0) == (blocks < 200)


def test_beams_share_their_common_blocks() -> None:
    request = beam_request(0, 4, 12)
    scheduler = Scheduler(BlockPool(200), BLOCK, 64, 32)
    scheduler.add(Request(0, tuple(range(5, 37)), request.params, ()))
    machine, held = Machine(), []
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, machine.run(plan))
        held.append(scheduler.pool.counts.held)
    assert max(held) <= 8 + 4 * 3  # the prompt's blocks once; at most three of its own for each beam


def test_beams_go_on_from_the_candidates_that_landed() -> None:
    request = beam_request(0, 4, 10, n=2)
    scheduler = Scheduler(BlockPool(40), BLOCK, 16, 32)
    reservation = scheduler.reserve(request)
    assert reservation is not None
    machine = Machine()
    machine._pool = {
        block: [*request.token_ids[index * BLOCK :][:BLOCK], None][:BLOCK]
        for index, block in enumerate(reservation.blocks)
    }
    top = likeliest_after(list(request.token_ids), request.params.logprobs)
    assert scheduler.activate(0, [FirstToken(0, 0, 0.0, end=None, top=top)]) == []
    answers: dict[tuple[int, int], list[int]] = {}
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        collect(scheduler.commit(plan, machine.run(plan)), answers)
    assert list(answers.values()) == answers_of(request)


def test_search_of_one_token_ends_at_landing() -> None:
    request = beam_request(0, 3, 1, n=2)
    scheduler = Scheduler(BlockPool(40), BLOCK, 16, 32)
    scheduler.reserve(request)
    top = likeliest_after(list(request.token_ids), request.params.logprobs)
    made = scheduler.activate(0, [FirstToken(0, 0, 0.0, end=None, top=top)])
    assert [each.drawn.token_id for each in made if isinstance(each, TokenMade)] == [each.token_id for each in top[:2]]
    assert not scheduler.has_work
    assert scheduler.pool.counts.held == 0


def test_abort_ends_all_beams() -> None:
    scheduler = Scheduler(BlockPool(40), BLOCK, 16, 32)
    scheduler.add(beam_request(0, 4, 10))
    machine = Machine()
    for _ in range(3):
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, machine.run(plan))
    assert not scheduler.stop_choice(0, 1)
    assert scheduler.abort(0)
    assert not scheduler.has_work
    assert scheduler.pool.counts.held == 0


def test_nonfinite_beam_fails_its_request() -> None:
    scheduler = Scheduler(BlockPool(40), BLOCK, 16, 32)
    scheduler.add(beam_request(0, 4, 10))
    machine = Machine()
    plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(plan, machine.run(plan))
    plan = scheduler.plan()
    assert plan is not None
    results = machine.run(plan)
    assert scheduler.commit(plan, [results[0], NonFinite(), *results[2:]]) == [RequestFailed(0)]
    assert not scheduler.has_work
    assert scheduler.pool.counts.held == 0


def test_beams_that_could_never_run_together_are_refused() -> None:
    scheduler = Scheduler(BlockPool(20), BLOCK, 16, 32)
    with pytest.raises(RequestTooLong, match="4 beams may need 22 blocks; the pool has 20"):
        scheduler.add(beam_request(0, 4, 12))
