"""A sequence whose mask was late is drawn from in the next step; nobody else notices."""

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.request import Computed, Drawn, NonFinite, Plan, Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import RequestFailed, TokenMade

BLOCK = 4
LATE = Computed(late=True)


def running(*prompts: int) -> Scheduler:
    """With a request for each prompt, of so many tokens, and the first token of each made."""
    scheduler = Scheduler(BlockPool(32), BLOCK, max_step_tokens=64, max_sequences=8)
    for number, tokens in enumerate(prompts):
        scheduler.add(Request(number, tuple(range(1, tokens + 1)), SamplingParams(max_tokens=9), ()))
    made = step(scheduler, {})
    assert all(isinstance(outcome, TokenMade) for outcome in made[1::2])
    return scheduler


def plan_of(scheduler: Scheduler) -> Plan:
    plan = scheduler.plan()
    assert plan is not None
    return plan


def step(scheduler: Scheduler, results: dict[int, Computed | NonFinite]) -> list[object]:
    plan = plan_of(scheduler)
    return list(scheduler.commit(plan, [results.get(c.request_id, Computed((Drawn(7, 0.0),))) for c in plan.chunks]))


def test_the_same_token_is_computed_again() -> None:
    scheduler = running(6, 7)
    before = plan_of(scheduler)
    made = scheduler.commit(before, [LATE, Computed((Drawn(9, 0.0),))])
    assert [outcome.request_id for outcome in made] == [1]
    after = plan_of(scheduler)
    assert after.chunks[0] == before.chunks[0]
    assert after.chunks[1].start == before.chunks[1].start + 1


def test_however_often_it_is_late_its_tokens_come_in_order() -> None:
    scheduler = running(6)
    for _ in range(5):
        assert step(scheduler, {0: LATE}) == []
    [made] = step(scheduler, {})
    assert isinstance(made, TokenMade)
    assert made.offset == 1
    scheduler.abort(0)
    scheduler.pool.check_conservation()


def test_a_sequence_computed_again_after_a_preemption_repeats_only_its_last_token() -> None:
    scheduler = running(6)
    step(scheduler, {})
    sequence = scheduler.batch.newest_preemptible()
    scheduler.batch.preempt(sequence)
    recomputed = plan_of(scheduler)
    assert len(recomputed.chunks[0].token_ids) == 8
    assert scheduler.commit(recomputed, [LATE]) == []
    assert list(plan_of(scheduler).chunks[0].token_ids) == [7]
    assert plan_of(scheduler).chunks[0].start == 7


def test_a_form_that_cannot_be_followed_ends_its_request_with_the_cause() -> None:
    scheduler = running(6, 7)
    made = step(scheduler, {0: NonFinite("no way on")})
    assert made[0] == RequestFailed(0, "no way on")
    assert isinstance(made[1], TokenMade)
