"""The engine's step: plan, run, commit, and nothing in between."""

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.request import Computed, Drawn, Plan
from baton.engine.runner.engine import Engine
from baton.engine.runner.launched import Launched, launched_with
from baton.engine.sampling.params import SamplingParams
from tests.fixtures.prefill import prefill_request, prefill_scheduler


class SuccessorRunner:
    """A model that answers every token with the next id."""

    launches_ahead = False

    def __init__(self) -> None:
        self.plans: list[Plan] = []

    def launch(self, plan: Plan, after: Launched | None = None) -> Launched:
        self.plans.append(plan)
        results = [Computed(tuple(Drawn(chunk.token_ids[-1] + 1, 0.0) for _ in chunk.samples)) for chunk in plan.chunks]
        return launched_with(tuple(results))


def test_an_idle_engine_does_not_run():
    runner = SuccessorRunner()
    assert Engine(runner, prefill_scheduler(BlockPool(4), 4, 8)).step() is None
    assert runner.plans == []


def test_a_step_computes_one_plan_and_commits_it():
    runner, scheduler = SuccessorRunner(), prefill_scheduler(BlockPool(4), 4, 8)
    engine = Engine(runner, scheduler)
    scheduler.add(prefill_request(1, (4, 5, 6), SamplingParams(max_tokens=2)))
    [progress] = engine.step()
    assert len(runner.plans) == 1
    assert [token.token_id for token in progress.first] == [7]
    assert engine.step() is None
