"""A model on two ranks, over gloo: the same answers as transformers, and an end in bounded time when a rank dies."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.engine import Engine
from engine.mixed_scheduler import MixedScheduler
from engine.mixed_state import TokenMade
from engine.model_config import ModelError
from engine.pages import BlockPool
from engine.parallel.collectives import RankLost
from engine.prepare import ModelOptions, prepare_model
from engine.runner import Runner
from engine.sampling_params import SamplingParams
from engine.sequence import Request
from engine.swap_space import SwapSpace
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import random_prompt

BLOCK_TOKENS, ROOMY, TIGHT, NEW_TOKENS = 8, 64, 14, 12
PROMPTS = [random_prompt(length) for length in (1, 7, 8, 9, 50)]
GREEDY = [Request(index, tuple(prompt), SamplingParams(NEW_TOKENS), ()) for index, prompt in enumerate(PROMPTS)]
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, seed=7)
MIXED = [
    Request(0, tuple(random_prompt(30)), SamplingParams(max_tokens=24), ()),
    Request(1, tuple(random_prompt(27)), replace(SAMPLED, repetition_penalty=1.3), ()),
    Request(2, tuple(random_prompt(21)), replace(SAMPLED, n=3), ()),
    Request(3, tuple(random_prompt(30)), replace(SAMPLED, top_p=0.9, prompt_logprobs=2), ()),
]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied_head_of_odd_size_and_biases": ("llama", {"vocab_size": 511, "attention_bias": True}),
    "own_head_and_experts": ("mixtral", {}),
}
Answers = dict[tuple[int, int], list[int]]


@contextmanager
def loaded(folder: Path, ranks: int, **others: Any) -> Iterator[Runner]:
    values: dict[str, Any] = {"dtype": "float32", "tensor_parallel": ranks, **others}
    options = ModelOptions(
        folder, torch.device("cpu"), block_tokens=BLOCK_TOKENS, kv_memory_bytes=1 << 22, max_model_len=256, **values
    )
    prepared = prepare_model(options)
    runner = prepared.load(torch.zeros(prepared.pool_bytes, dtype=torch.uint8), progress=False, host_slots=ROOMY)
    try:
        yield runner
    finally:
        runner.close()


def answer(runner: Runner, requests: list[Request], blocks: int = ROOMY) -> Answers:
    scheduler = MixedScheduler(BlockPool(blocks), BLOCK_TOKENS, 16, 8, swap=SwapSpace(ROOMY))
    engine = Engine(runner, scheduler)
    for request in requests:
        scheduler.add(request, bytes(32))
    answers: Answers = {}
    while (outcomes := engine.step()) is not None:
        for outcome in outcomes:
            if isinstance(outcome, TokenMade):
                answers.setdefault((outcome.request_id, outcome.choice), []).append(outcome.drawn.token_id)
    assert blocks == ROOMY or scheduler.counters.swapped_tokens
    return answers


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_answer_as_transformers(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    folder = make_checkpoint(tmp_path, family, **overrides)
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with loaded(folder, ranks=2) as runner:
        answers = answer(runner, GREEDY)
    for request in GREEDY:
        ids = torch.tensor([request.token_ids])
        made = reference.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0)
        assert answers[request.request_id, 0] == made[0, ids.shape[1] :].tolist()


def test_sampled_and_swapped_answers_of_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    with loaded(folder, ranks=1) as runner:
        expected = answer(runner, MIXED)
    with loaded(folder, ranks=2) as runner:
        assert answer(runner, MIXED, blocks=TIGHT) == expected


def test_a_killed_rank_ends_the_step_with_an_error(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    with loaded(folder, ranks=2) as runner:
        runner.warm_up()
        assert runner.followers is not None
        os.kill(runner.followers.process_ids[0], signal.SIGKILL)
        with pytest.raises(RankLost):
            answer(runner, GREEDY)


def test_a_model_that_cannot_be_cut_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "mistral")
    with pytest.raises(ModelError, match="tensor-parallel is 2; num_key_value_heads of this model is 1"):
        loaded(folder, ranks=2).__enter__()
