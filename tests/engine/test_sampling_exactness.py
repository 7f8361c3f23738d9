"""Answers through the scheduler and a real model equal transformers' generate, token for token, in float32."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.request import Chunk, Plan, Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import first_tokens
from tests.fixtures.paged import PagedModel, drawn, random_prompt
from tests.fixtures.prefill import first_samples

MAX_TOKENS = 24
PROMPT = tuple(random_prompt(37))
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing special": ({}, {}),
    "repetition": ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    "favoured repetition": ({"repetition_penalty": 0.6}, {"repetition_penalty": 0.6}),
    "bias": ({"logit_bias": {9: 4.0, 80: 3.0}}, {"sequence_bias": [[[9], 4.0], [[80], 3.0]]}),
}


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def generated(model: Any, **fields: Any) -> list[int]:
    with torch.inference_mode():
        whole = model.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            pad_token_id=0,
            **fields,
        )
    tokens: list[int] = whole[0, len(PROMPT) :].tolist()
    return tokens


def answers(checkpoint: Path, kinds: Sequence[SamplingParams]) -> list[list[int]]:
    """All of them side by side in one batch; choice 0 of each."""
    paged = PagedModel(checkpoint)
    scheduler = Scheduler(BlockPool(64), paged.block_tokens, max_step_tokens=64, max_sequences=len(kinds))
    made: list[list[int]] = []
    for index, params in enumerate(kinds):
        request = Request(index, PROMPT, params, ())
        reservation = scheduler.reserve(request)
        assert reservation is not None
        chunk = Chunk(index, PROMPT, 0, reservation.blocks, first_samples(request))
        [result] = paged.runner.run(Plan((chunk,)))
        first = first_tokens(chunk, drawn(result))
        scheduler.activate(index, first)
        made.append([first[0].token_id])
    while (plan := scheduler.plan()) is not None:
        for step in scheduler.commit(plan, paged.runner.run(plan)):
            made[step.request_id].append(step.drawn.token_id)
    return made


def test_answers_equal_transformers_side_by_side(checkpoint: Path, expected: Any) -> None:
    kinds = [SamplingParams(max_tokens=MAX_TOKENS, **ours) for ours, _ in CASES.values()]
    wanted = [generated(expected, **theirs) for _, theirs in CASES.values()]
    assert answers(checkpoint, kinds) == wanted
    assert len({tuple(answer) for answer in wanted}) == len(CASES), "a case that changes nothing tests nothing"


def test_bad_words_are_never_completed_and_others_sampled_instead(checkpoint: Path, expected: Any) -> None:
    plain = generated(expected)
    words = [[plain[3]], plain[7:9], plain[10:13]]
    params = SamplingParams(max_tokens=MAX_TOKENS, bad_words=tuple(tuple(word) for word in words))
    assert answers(checkpoint, [params]) == [generated(expected, bad_words_ids=words)] != [plain]


def test_answer_continues_until_min_tokens(checkpoint: Path, expected: Any) -> None:
    stop = generated(expected)[4]
    params = SamplingParams(max_tokens=MAX_TOKENS, min_tokens=10, stop_token_ids=frozenset({stop}))
    [answer] = answers(checkpoint, [params])
    wanted = generated(expected, min_new_tokens=10, eos_token_id=stop)
    assert answer == wanted
    assert len(answer) >= 10
