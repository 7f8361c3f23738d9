"""Answers with drafts equal those without, to the last bit of every log-probability, on a real model on the CPU.

Greedy and sampled, with penalties and several choices, beside each other; drafts that are right, wrong, or looked up.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.models import decoder
from baton.engine.models.batch import make_batch
from baton.engine.request import Chunk, Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.drafts import PerSequenceDrafter
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.speculation import Speculated, Speculation
from baton.kernels.attention import rotated_decode
from tests.fixtures import paged as drivers
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import CPU, Answers, PagedModel, random_prompt

BLOCK, BLOCKS, STEP_TOKENS, SLOTS = 8, 320, 2048, 64
GREEDY = SamplingParams(max_tokens=24, logprobs=2)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, seed=7, logprobs=1)
PARAMS = [
    GREEDY,
    replace(GREEDY, max_tokens=1),
    SAMPLED,
    replace(SAMPLED, n=3),
    replace(SAMPLED, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.5),
    replace(GREEDY, presence_penalty=0.7, min_tokens=10),
    replace(SAMPLED, top_k=5, stop_token_ids=frozenset(range(0, 200, 17))),
]


def requests() -> list[Request]:
    lengths = random.Random(3)
    return [
        Request(number, tuple(random_prompt(lengths.randint(1, 70), seed=number)), params, ())
        for number, params in enumerate(PARAMS * 2)
    ]


class Knows:
    """Drafts an answer that is known, each token of it right with a chance of `right`."""

    def __init__(self, answers: Sequence[Sequence[int]], right: float) -> None:
        self._answers = answers  # prompts with them
        self._right = right
        self._draw = random.Random(1)

    def draft(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        length = len(token_ids)
        whole = next(each for each in self._answers if list(each[:length]) == list(token_ids))
        return [
            token_id if self._draw.random() < self._right else token_id ^ 1
            for token_id in whole[length : length + most]
        ]


@pytest.fixture(scope="module", params=["llama float32", "llama bfloat16", "gemma3_text float32"])
def paged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PagedModel:
    family, dtype = request.param.split()
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("speculation"), family)
    return PagedModel(checkpoint, BLOCK, BLOCKS, getattr(torch, dtype), packed=True)


def answered(
    paged: PagedModel, speculation: Speculation | None, at_once: int, cache_root: bytes | None = None
) -> Answers:
    scheduler = Scheduler(paged.pool(BLOCKS), BLOCK, STEP_TOKENS, SLOTS, speculation=speculation)
    return drivers.answered(paged.runner, scheduler, requests(), cache_root, at_once)


@pytest.fixture(scope="module")
def plain(paged: PagedModel) -> Answers:
    return answered(paged, None, at_once=1)


def known(plain: Answers, right: float) -> PerSequenceDrafter:
    prompts = {request.request_id: list(request.token_ids) for request in requests()}
    whole = [prompts[number] + [drawn.token_id for drawn in made] for (number, _), made in plain.items()]
    return PerSequenceDrafter(lambda: Knows(whole, right))


@pytest.mark.parametrize(("at_once", "right"), [(1, 0.8), (4, 1.0), (14, 0.0), (14, 0.8)])
def test_nothing_changes_however_often_drafts_are_right(
    paged: PagedModel, plain: Answers, at_once: int, right: float
) -> None:
    speculation = Speculation(5, drafter=known(plain, right))
    assert answered(paged, speculation, at_once) == plain
    check(speculation.done, right)


def check(counters: Speculated, right: float) -> None:
    assert counters.drafted_tokens > 20
    if right in (0.0, 1.0):
        # Choices of one request may have begun alike: the draft is of one of them.
        assert counters.accepted_tokens == 0.0 if right == 0.0 else counters.accepted_tokens > 100


@pytest.mark.parametrize("at_once", [1, 4, 14])
def test_nothing_changes_with_drafts_that_are_looked_up(paged: PagedModel, plain: Answers, at_once: int) -> None:
    speculation = Speculation(5)
    assert answered(paged, speculation, at_once) == plain


@pytest.mark.parametrize("at_once", [1, 14])
def test_nothing_changes_with_drafts_out_of_answers_that_have_ended(
    paged: PagedModel, plain: Answers, at_once: int
) -> None:
    speculation = Speculation(5)
    for _ in range(2):
        before = speculation.done.accepted_tokens
        assert answered(paged, speculation, at_once, cache_root=bytes(32)) == plain
    assert speculation.done.accepted_tokens - before > 100, "every answer was there before"


def test_keys_of_drafts_are_stored_before_any_row_attends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a decode step's attention stores a row's keys where it reads them, which another may need by then."""
    paged = PagedModel(make_checkpoint(tmp_path, "llama"), BLOCK, 1)
    together: list[int] = []

    def counted(qkv: torch.Tensor, *others: Any) -> torch.Tensor:
        together.append(len(qkv))
        return rotated_decode(qkv, *others)

    monkeypatch.setattr(decoder, "rotated_decode", counted)
    newest, draft = Chunk(0, [5], 3, [0]), Chunk(0, [6], 4, [0], is_draft=True)
    with torch.inference_mode():
        for chunks in ([newest], [newest, draft]):
            paged.model.hidden(make_batch(chunks, BLOCK, CPU), paged.kv)
    assert together == [1] * paged.model.config.num_layers
