"""Answers that a second model drafts equal those without, to the last bit of every log-probability, on real models.

Drafted by the model itself, which is right, and by another random one, which is nearly never; greedy and sampled,
beside each other, with preemption, aborts, and a pool of drafts that is too short.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.engine.drafting.model_drafter import ModelDrafter
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.request import Drawn, Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import RequestFailed, TokenMade
from baton.engine.scheduler.speculation import Speculated, Speculation
from baton.text.block_hash import root_hash
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import PagedModel, random_prompt

BLOCK, BLOCKS, STEP_TOKENS, SLOTS, MOST = 8, 320, 2048, 64, 5
TIGHT = 24  # blocks of the larger model: answers preempt each other
GREEDY = SamplingParams(max_tokens=20, logprobs=2)
SAMPLED = SamplingParams(max_tokens=20, temperature=1.0, seed=7, logprobs=1)
PARAMS = [
    GREEDY,
    SAMPLED,
    replace(SAMPLED, n=2),
    replace(SAMPLED, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.5),
    replace(GREEDY, presence_penalty=0.7, min_tokens=10),
    replace(SAMPLED, top_k=5, stop_token_ids=frozenset(range(0, 200, 17))),
]
ROOT = root_hash(b"model", "any")
Answers = dict[tuple[int, int], list[Drawn]]


def requests(params: list[SamplingParams]) -> list[Request]:
    lengths = random.Random(3)
    return [
        Request(number, tuple(random_prompt(lengths.randint(1, 70), seed=number)), each, ())
        for number, each in enumerate(params)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("draft_model")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def paged(request: pytest.FixtureRequest, folder: Path) -> PagedModel:
    checkpoint = make_checkpoint(folder / "own", "llama")
    return PagedModel(checkpoint, BLOCK, BLOCKS, getattr(torch, request.param), packed=True)


@pytest.fixture(scope="module")
def own(folder: Path, paged: PagedModel) -> PagedModel:
    return PagedModel(folder / "own", BLOCK, BLOCKS, paged.model.dtype, packed=True)


@pytest.fixture(scope="module")
def other(folder: Path) -> PagedModel:
    checkpoint = make_checkpoint(folder / "other", "qwen2", seed=9, num_hidden_layers=2)
    return PagedModel(checkpoint, BLOCK, BLOCKS, packed=True)


def drafting(paged: PagedModel, blocks: int = BLOCKS) -> ModelDrafter:
    """With passes that take no time: it always pays."""
    return ModelDrafter(paged.runner.run, blocks, BLOCK, paged.model.config.max_positions, clock=lambda: 0.0)


class Run:
    """Answers requests, `at_once` of them at a time; `aborted` are given up when they have 8 tokens."""

    def __init__(
        self,
        paged: PagedModel,
        drafter: ModelDrafter | None,
        at_once: int = 4,
        params: list[SamplingParams] = PARAMS,
        blocks: int = BLOCKS,
        aborted: tuple[int, ...] = (),
    ) -> None:
        speculation = None if drafter is None else Speculation(MOST, drafter=drafter)
        scheduler = Scheduler(BlockPool(blocks), BLOCK, STEP_TOKENS, SLOTS, speculation=speculation)
        self.answers = Answers()
        waiting = requests(params)
        while True:
            while waiting and len(scheduler.batch.requests) < at_once:
                scheduler.add(waiting.pop(0), ROOT)
            plan = scheduler.plan()
            if plan is None:
                break
            for outcome in scheduler.commit(plan, paged.runner.run(plan)):
                assert not isinstance(outcome, RequestFailed)
                if isinstance(outcome, TokenMade):
                    made = self.answers.setdefault((outcome.request_id, outcome.choice), [])
                    made.append(outcome.drawn)
                    if outcome.request_id in aborted and len(made) >= 8:
                        scheduler.abort(outcome.request_id)
            scheduler.observe(plan, duration_s=1.0)
        self.preemptions = scheduler.counters.preemptions
        self.done = Speculated() if speculation is None else speculation.done
        if drafter is not None:
            drafter.pool.check_conservation()
            assert drafter.pool.counts.held == 0, "an answer has ended, and its blocks are held"


@pytest.fixture(scope="module")
def plain(paged: PagedModel) -> Answers:
    return Run(paged, None, at_once=1).answers


@pytest.mark.parametrize("at_once", [1, 3, 6])
def test_nothing_changes_where_drafts_are_right(
    paged: PagedModel, own: PagedModel, plain: Answers, at_once: int
) -> None:
    run = Run(paged, drafting(own), at_once)
    assert run.answers == plain
    assert run.done.accepted_tokens > 80


@pytest.mark.parametrize("at_once", [1, 6])
def test_wrong_drafts_change_nothing(paged: PagedModel, other: PagedModel, plain: Answers, at_once: int) -> None:
    run = Run(paged, drafting(other), at_once)
    assert run.answers == plain
    assert run.done.drafted_tokens > 80
    assert run.done.accepted_tokens < 0.2 * run.done.drafted_tokens


@pytest.mark.parametrize(
    "params",
    [GREEDY, SAMPLED, replace(SAMPLED, top_p=0.9, top_k=50), replace(SAMPLED, min_p=0.01, presence_penalty=0.5)],
    ids=["greedy", "temperature 1", "filters", "penalties"],
)
def test_model_that_drafts_for_itself_is_nearly_always_right(
    paged: PagedModel, own: PagedModel, params: SamplingParams
) -> None:
    done = Run(paged, drafting(own), params=[replace(params, seed=seed) for seed in range(8)]).done
    assert done.drafted_tokens > 100
    assert done.accepted_tokens > 0.95 * done.drafted_tokens


def test_nothing_changes_where_answers_preempt_each_other(own: PagedModel, folder: Path) -> None:
    """In float32: a prompt that is computed again is summed up in another order."""
    paged = PagedModel(folder / "own", BLOCK, BLOCKS, packed=True)
    tokens = {key: [drawn.token_id for drawn in made] for key, made in Run(paged, None, at_once=1).answers.items()}
    run = Run(paged, drafting(own), at_once=6, blocks=TIGHT)
    assert run.preemptions > 0
    assert {key: [drawn.token_id for drawn in made] for key, made in run.answers.items()} == tokens


def test_cancelled_answers_change_no_other(paged: PagedModel, own: PagedModel, plain: Answers) -> None:
    aborted = (1, 4)
    answers = Run(paged, drafting(own), at_once=6, aborted=aborted).answers
    for key, made in plain.items():
        assert answers[key] == (made[: len(answers[key])] if key[0] in aborted else made)
    assert all(8 <= len(answers[number, 0]) <= 8 + MOST for number in aborted), "a step's tokens come together"


@pytest.mark.parametrize("blocks", [2, 6, 14])
def test_nothing_changes_where_prompts_are_longer_than_the_pool_of_drafts(
    paged: PagedModel, own: PagedModel, plain: Answers, blocks: int
) -> None:
    assert max(len(request.token_ids) for request in requests(PARAMS)) > 6 * BLOCK
    run = Run(paged, drafting(own, blocks), at_once=6)
    assert run.answers == plain
    assert run.done.drafted_tokens > 0


def test_nonfinite_draft_model_drafts_nothing_and_fails_nobody(paged: PagedModel, folder: Path, plain: Answers) -> None:
    spoilt = PagedModel(make_checkpoint(folder / "spoilt", "qwen2", seed=9, num_hidden_layers=2), BLOCK, BLOCKS)
    spoilt.model.norm.weight.fill_(float("nan"))  # type: ignore[attr-defined]
    run = Run(paged, drafting(spoilt), at_once=6)
    assert run.answers == plain
    assert run.done.drafted_tokens == 0
