"""An exception that one request's data leads to in the engine ends that request; its neighbours of the step go on."""

from typing import Any, cast

import pytest
import torch

from baton.engine.kv_cache.block_pool import BlockError, BlockPool
from baton.engine.request import Computed, Drawn, NonFinite, Request, Sample
from baton.engine.sampling import sampler
from baton.engine.sampling.constraint import Constraint
from baton.engine.sampling.params import SamplingParams
from baton.engine.sampling.sampler import Row, sample, sample_each
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import RequestFailed, ScheduledSequence, TokenMade

PLAIN = SamplingParams(max_tokens=4, temperature=0.7, seed=3)
ODD = SamplingParams(max_tokens=4, logit_bias={5: 1.0})
LOGITS = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))


def row(params: SamplingParams) -> Row:
    return Row((Sample(0, params, (1, 2), 2),), 9)


class Broken:
    def mask(self, *_: object) -> Any:
        raise IndexError("no such token")


def test_row_whose_logits_cannot_be_adjusted_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [sample(LOGITS[:1], [row(PLAIN)])[0], sample(LOGITS[2:], [row(PLAIN)])[0]]

    def fails(*_: object) -> None:
        raise OverflowError("a bias")

    monkeypatch.setattr(sampler, "adjust", fails)
    first, odd, last = sample_each(LOGITS, [row(PLAIN), row(ODD), row(PLAIN)])
    assert [first, last] == alone
    assert isinstance(odd, NonFinite)
    assert odd.cause == "no token can be drawn: OverflowError: a bias"
    with pytest.raises(OverflowError):
        sample_each(LOGITS[:2], [row(ODD), row(ODD)])  # no row of several: it is not one request's fault


def test_row_whose_constraint_fails_to_make_a_mask_fails_alone() -> None:
    broken = SamplingParams(max_tokens=4, constraint=cast(Constraint, Broken()))
    first, failed = sample(LOGITS[:2], [row(PLAIN), row(broken)])
    assert first == sample(LOGITS[:1], [row(PLAIN)])[0]
    assert isinstance(failed, NonFinite)
    assert "no such token" in failed.cause


@pytest.fixture
def scheduler() -> Scheduler:
    scheduler = Scheduler(BlockPool(16), 4, 8, 4)
    for number in (1, 2):
        scheduler.add(Request(number, (1, 2, 3), SamplingParams(max_tokens=4), ()))
    return scheduler


def commit(scheduler: Scheduler) -> list[object]:
    plan = scheduler.plan()
    assert plan is not None
    return list(scheduler.commit(plan, [Computed((Drawn(7, 0.0),)) for _ in plan.chunks]))


def test_scheduler_commit_fails_the_request_that_raises(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = ScheduledSequence.publish

    def fails_for_one(self: ScheduledSequence, block_tokens: int) -> None:
        if self.request.request_id == 1:
            raise ValueError("odd")
        publish(self, block_tokens)

    monkeypatch.setattr(ScheduledSequence, "publish", fails_for_one)
    outcomes = commit(scheduler)
    assert RequestFailed(1, "step failed: ValueError: odd") in outcomes
    assert [each.request_id for each in outcomes if isinstance(each, TokenMade)] == [2]
    scheduler.abort(2)
    assert scheduler.pool.counts.held == 0
    scheduler.pool.check_conservation()


def test_scheduler_commit_passes_on_a_broken_pool(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise BlockError("a block is missing")

    monkeypatch.setattr(ScheduledSequence, "publish", fails)
    with pytest.raises(BlockError):
        commit(scheduler)
