"""Steps that are planned and launched before the one before is known: the same answers, and as many steps ahead."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.hashing import cache_root
from engine.launched import Launched, launch_greedy
from engine.mixed_scheduler import MixedScheduler
from engine.mixed_state import TokenMade
from engine.overlapped import OverlappedEngine
from engine.pages import BlockPool
from engine.plan import Computed, NonFinite, Plan
from engine.runner import Runner
from engine.sampling_params import SamplingParams
from engine.sequence import Request
from engine.swap_space import SwapSpace
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import PagedModel, random_prompt

BLOCK, BLOCKS = 8, 24
GREEDY = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, seed=7)
REQUESTS = [
    Request(0, tuple(random_prompt(30)), GREEDY, ()),
    Request(1, tuple(random_prompt(5)), replace(SAMPLED, n=3), ()),
    Request(2, tuple(random_prompt(9)), replace(SAMPLED, top_p=0.9, max_tokens=3), ()),
    Request(3, tuple(random_prompt(8)), replace(GREEDY, max_tokens=40), ()),
]
LOOKS_BACK = Request(4, tuple(random_prompt(12)), replace(SAMPLED, repetition_penalty=1.3), ())
Answers = dict[tuple[int, int], list[int]]


class CountingRunner:
    """The real one; counts the steps that were launched before the one before was known."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.ahead = 0

    def run(self, plan: Plan) -> Sequence[Computed | NonFinite]:
        return self._runner.run(plan)

    def launch(self, plan: Plan, after: Launched | None) -> Launched:
        self.ahead += after is not None
        return self._runner.launch(plan, after)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("overlapped"), "llama")


def answer(checkpoint: Path, requests: Sequence[Request], overlapped: bool, blocks: int) -> tuple[Answers, int]:
    paged = PagedModel(checkpoint, BLOCK, blocks)
    runner = CountingRunner(paged.runner)
    pool = BlockPool(blocks)
    scheduler = MixedScheduler(pool, BLOCK, 16, max_sequences=8, swap=SwapSpace(0))
    engine = OverlappedEngine(runner, scheduler) if overlapped else Engine(paged.runner, scheduler)
    for request in requests:
        scheduler.add(request, cache_root(b"model", "float32"))
    answers: Answers = {}
    while (outcomes := engine.step()) is not None:
        for outcome in outcomes:
            assert isinstance(outcome, TokenMade) or not hasattr(outcome, "drawn")
            if isinstance(outcome, TokenMade):
                answers.setdefault((outcome.request_id, outcome.choice), []).append(outcome.drawn.token_id)
    assert pool.counts.held == 0
    return answers, runner.ahead


@pytest.mark.parametrize("requests", [REQUESTS, [*REQUESTS, LOOKS_BACK]], ids=["alone", "with_one_that_looks_back"])
@pytest.mark.parametrize("blocks", [BLOCKS, 9])
def test_answers_are_those_of_steps_one_by_one(checkpoint: Path, requests: list[Request], blocks: int) -> None:
    expected, _ = answer(checkpoint, requests, overlapped=False, blocks=blocks)
    assert answer(checkpoint, requests, overlapped=True, blocks=blocks)[0] == expected


def test_most_steps_of_running_answers_are_launched_ahead(checkpoint: Path) -> None:
    _, ahead = answer(checkpoint, [REQUESTS[0], REQUESTS[3]], overlapped=True, blocks=BLOCKS)
    assert ahead >= 36, "of the 39 steps that one answer or both of them take after their prompts"


def test_greedy_draws_without_the_host_are_those_of_the_logits() -> None:
    hidden, logits = torch.randn(5, 8), torch.randn(3, 50)
    launched = launch_greedy(hidden, logits, [0, 0, 1, 2, 2])
    for row, result in enumerate(launched.results()):
        assert isinstance(result, Computed)
        [drawn] = result.drawn
        assert drawn.token_id == logits[row].argmax() == launched.tokens[row]
        assert drawn.logprob == pytest.approx(logits.log_softmax(-1)[row, drawn.token_id].item(), abs=1e-6)


@pytest.mark.parametrize("spoilt", ["hidden", "logits"])
def test_a_chunk_that_is_not_finite_spoils_no_other(spoilt: str) -> None:
    hidden, logits = torch.randn(5, 8), torch.randn(3, 50)
    if spoilt == "hidden":
        hidden[3, 2] = torch.nan
    else:
        logits[2, 7] = torch.inf
    kinds = [type(result) for result in launch_greedy(hidden, logits, [0, 0, 1, 2, 2]).results()]
    assert kinds == [Computed, Computed, NonFinite]
