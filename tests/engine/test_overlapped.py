"""Steps that are planned and launched before the one before is known: the same answers, and as many steps ahead."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.swap_space import SwapSpace
from baton.engine.models.batch import to_device
from baton.engine.request import Chunk, Computed, NonFinite, Plan, Request, Sample
from baton.engine.runner.engine import Engine
from baton.engine.runner.launched import Launched, draws_on_device, launch_draws
from baton.engine.runner.runner import Runner
from baton.engine.sampling.params import SamplingParams
from baton.engine.sampling.sampler import Row, sample
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import TokenMade
from baton.text.block_hash import root_hash
from tests.fixtures.paged import PagedModel, drawn, random_prompt

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

    def __init__(self, runner: Runner, overlapped: bool) -> None:
        self._runner = runner
        self._runner.may_launch_ahead = self.launches_ahead = overlapped
        self.ahead = 0

    def launch(self, plan: Plan, after: Launched | None = None) -> Launched:
        self.ahead += after is not None
        return self._runner.launch(plan, after)


def answer(checkpoint: Path, requests: Sequence[Request], overlapped: bool, blocks: int) -> tuple[Answers, int]:
    paged = PagedModel(checkpoint, BLOCK, blocks)
    runner = CountingRunner(paged.runner, overlapped)
    pool = BlockPool(blocks)
    scheduler = Scheduler(pool, BLOCK, 16, max_sequences=8, swap=SwapSpace(0))
    engine = Engine(runner, scheduler)
    for request in requests:
        scheduler.add(request, root_hash(b"model", "float32"))
    answers: Answers = {}
    while (outcomes := engine.step()) is not None:
        for outcome in outcomes:
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


CHUNKS = (
    Chunk(0, [1, 2], 0, [0], (Sample(0, GREEDY),)),
    Chunk(1, [3], 6, [1], tuple(Sample(choice, SAMPLED) for choice in range(3))),
    Chunk(2, [4, 5], 8, [2]),
    Chunk(3, [6], 2, [3], (Sample(0, replace(SAMPLED, top_k=5, top_p=0.7)),)),
)
CHUNK_ROWS = (slice(2, 4), slice(0, 1), slice(4, 6), slice(1, 2))  # tokens alone come first


def test_draws_without_the_host_are_those_with_it() -> None:
    hidden, head = torch.randn(6, 8), torch.randn(8, 50)
    launched = launch_draws(hidden, lambda rows: rows @ head, CHUNKS, CHUNK_ROWS)
    drawing = [(chunk, rows.stop - 1) for chunk, rows in zip(CHUNKS, CHUNK_ROWS, strict=True) if chunk.samples]
    logits = hidden[[row for _, row in drawing]] @ head
    expected = iter(sample(logits, [Row(chunk.samples, chunk.end) for chunk, _ in drawing]))
    for index, (chunk, result) in enumerate(zip(CHUNKS, launched.results(), strict=True)):
        assert isinstance(result, Computed)
        wanted = drawn(next(expected)) if chunk.samples else ()
        assert [each.token_id for each in result.drawn] == [each.token_id for each in wanted]
        assert [each.logprob for each in result.drawn] == pytest.approx([each.logprob for each in wanted], abs=1e-5)
        assert not wanted or launched.tokens[index] == wanted[0].token_id


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", ["hidden", "logits"])
def test_a_chunk_that_is_not_finite_spoils_no_other(spoilt: float, place: str) -> None:
    hidden = torch.randn(6, 8)
    if place == "hidden":
        hidden[2, 2] = hidden[4, 1] = spoilt

    def head(rows: torch.Tensor) -> torch.Tensor:
        logits = torch.randn(len(rows), 50)
        if place == "logits":
            logits[0, 7] = spoilt
        return logits

    kinds = [type(result) for result in launch_draws(hidden, head, CHUNKS, CHUNK_ROWS).results()]
    third = NonFinite if place == "hidden" else Computed
    assert kinds == [NonFinite, Computed, third, Computed]


@pytest.mark.parametrize("change", [{"min_p": 0.1}, {"typical_p": 0.5}, {"logprobs": 1}, {"presence_penalty": 1.0}])
def test_tokens_that_need_more_than_their_logits_are_not_drawn_on_the_device(change: dict[str, float]) -> None:
    asked = replace(SAMPLED, **change)  # type: ignore[arg-type]
    assert draws_on_device(CHUNKS)
    assert not draws_on_device([*CHUNKS, Chunk(4, [1], 0, [0], (Sample(0, asked),))])


def test_numbers_of_all_kinds_come_to_a_device_in_one_piece() -> None:
    columns = (array("q", [-1, 2**40]), array("d"), array("d", [0.1]), array("f", [0.5, 2, 3]), array("f", [7]))
    assert [part.tolist() for part in to_device(columns, torch.device("cpu"))] == [list(each) for each in columns]
