"""A prompt that comes while another one computes the same beginning waits those few steps, and computes its own."""

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.request import Computed, Drawn, NonFinite, Plan, Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from tests.fixtures.prefill import prefill_scheduler

BLOCK = 4
PARAMS = SamplingParams(max_tokens=2)


def prompt(number: int, shared_blocks: int, own_tokens: int, prefill_only: bool = True) -> Request:
    """Begins like all others for some blocks, and goes on with tokens and names of its own."""
    tokens = (*range(shared_blocks * BLOCK), *(1000 * number + place for place in range(own_tokens)))
    shared = tuple(b"shared %d" % index for index in range(shared_blocks))
    own = tuple(b"own %d of %d" % (index, number) for index in range(len(tokens) // BLOCK - shared_blocks))
    return Request(number, tokens, PARAMS, shared + own, prefill_only=prefill_only)


def spans(plan: Plan | None) -> list[tuple[int, int, int]]:
    return [(chunk.request_id, chunk.start, chunk.end) for chunk in plan.chunks] if plan is not None else []


def compute(scheduler: Scheduler, plan: Plan | None, failed: bool = False) -> None:
    assert plan is not None
    results = [
        NonFinite() if failed else Computed(tuple(Drawn(7, 0.0) for _ in chunk.samples)) for chunk in plan.chunks
    ]
    scheduler.commit(plan, results)


def test_sibling_is_not_admitted_with_the_step_that_computes_its_prefix() -> None:
    scheduler = prefill_scheduler(BlockPool(32), BLOCK, chunk_tokens=64)
    scheduler.add(prompt(1, shared_blocks=4, own_tokens=3))
    scheduler.add(prompt(2, shared_blocks=4, own_tokens=5))
    scheduler.add(prompt(3, shared_blocks=0, own_tokens=6))
    plan = scheduler.plan()
    assert spans(plan) == [(1, 0, 19), (3, 0, 6)], "who shares nothing goes on"
    compute(scheduler, plan)
    assert spans(scheduler.plan()) == [(2, 16, 21)]


def test_sibling_computes_the_prefix_where_the_first_prompt_failed() -> None:
    scheduler = prefill_scheduler(BlockPool(32), BLOCK, chunk_tokens=64)
    scheduler.add(prompt(1, shared_blocks=2, own_tokens=3))
    scheduler.add(prompt(2, shared_blocks=2, own_tokens=5))
    compute(scheduler, scheduler.plan(), failed=True)
    assert spans(scheduler.plan()) == [(2, 0, 13)]


def test_sibling_does_not_wait_for_its_last_tokens_block() -> None:
    """The block of its last token is computed in any case."""
    scheduler = prefill_scheduler(BlockPool(32), BLOCK, chunk_tokens=64)
    scheduler.add(prompt(1, shared_blocks=1, own_tokens=3))
    scheduler.add(prompt(2, shared_blocks=1, own_tokens=0))
    assert spans(scheduler.plan()) == [(1, 0, 7), (2, 0, 4)]


def test_prompts_that_a_decode_worker_computes_itself_wait_too() -> None:
    scheduler = Scheduler(BlockPool(32), BLOCK, max_step_tokens=64, max_sequences=8)
    scheduler.add(prompt(1, shared_blocks=3, own_tokens=3, prefill_only=False))
    scheduler.add(prompt(2, shared_blocks=3, own_tokens=5, prefill_only=False))
    plan = scheduler.plan()
    assert spans(plan) == [(1, 0, 15)]
    compute(scheduler, plan)
    assert (2, 12, 17) in spans(scheduler.plan())
