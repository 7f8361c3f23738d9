"""A model on two ranks, over gloo: the same answers as transformers, and an end in bounded time when a rank dies."""

import mmap
import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.engine.config.model_config import ModelError
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.swap_space import SwapSpace
from baton.engine.offline import params
from baton.engine.offline.llm import LLM
from baton.engine.parallel.collectives import RankLost
from baton.engine.parallel.wire import RankOptions
from baton.engine.prepare import ModelOptions, prepare_model
from baton.engine.request import BlockCopy, BlockSwap, Chunk, Computed, Drawn, NonFinite, Plan, Request, Sample
from baton.engine.runner.engine import Engine
from baton.engine.runner.runner import Runner
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import TokenMade
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import random_prompt

pytestmark = pytest.mark.usefixtures("forked_ranks")
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
Answers = dict[tuple[int, int], list[int]]


@contextmanager
def loaded(folder: Path, ranks: int, **others: Any) -> Iterator[tuple[Runner, torch.Tensor]]:
    """A runner, and its pool as `[rank][block][bytes]`."""
    values: dict[str, Any] = {"dtype": "float32", "tensor_parallel": ranks, **others}
    options = ModelOptions(
        folder, torch.device("cpu"), block_tokens=BLOCK_TOKENS, kv_memory_bytes=1 << 22, max_model_len=256, **values
    )
    prepared = prepare_model(options)
    fd = os.memfd_create("pool")
    os.ftruncate(fd, prepared.pool_bytes)
    storage = torch.frombuffer(mmap.mmap(fd, prepared.pool_bytes), dtype=torch.uint8)
    runner = prepared.load(storage, progress=False, host_slots=ROOMY, ranks=RankOptions(storage_fd=fd))
    os.close(fd)
    try:
        yield runner, storage.view(ranks, prepared.total_blocks, -1)
    finally:
        runner.close()


def drawn(runner: Runner, requests: list[Request], blocks: int = ROOMY) -> dict[tuple[int, int], list[Drawn]]:
    scheduler = Scheduler(BlockPool(blocks), BLOCK_TOKENS, 16, 8, swap=SwapSpace(ROOMY))
    engine = Engine(runner, scheduler)
    for request in requests:
        scheduler.add(request, bytes(32))
    answers: dict[tuple[int, int], list[Drawn]] = {}
    while (outcomes := engine.step()) is not None:
        for outcome in outcomes:
            if isinstance(outcome, TokenMade):
                answers.setdefault((outcome.request_id, outcome.choice), []).append(outcome.drawn)
    assert blocks == ROOMY or scheduler.counters.preemptions
    return answers


def answer(runner: Runner, requests: list[Request], blocks: int = ROOMY) -> Answers:
    return {key: [each.token_id for each in made] for key, made in drawn(runner, requests, blocks).items()}


def transformers_answers(folder: Path) -> Answers:
    """To GREEDY."""
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers: Answers = {}
    for request in GREEDY:
        ids = torch.tensor([request.token_ids])
        made = reference.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0)
        answers[request.request_id, 0] = made[0, ids.shape[1] :].tolist()
    return answers


def test_two_ranks_with_an_odd_tied_head_and_biases_equal_transformers(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", vocab_size=511, attention_bias=True)
    with loaded(folder, ranks=2) as (runner, _):
        assert answer(runner, GREEDY) == transformers_answers(folder)


def test_offline_engine_of_two_ranks_with_experts_answers_as_transformers(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "mixtral")
    llm = LLM(str(folder), dtype="float32", tensor_parallel_size=2, kv_memory=1 << 22, quiet=True)
    greedy = params.SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(PROMPTS, greedy, use_tqdm=False)
    llm.shutdown()
    made = {(index, 0): list(output.outputs[0].token_ids) for index, output in enumerate(outputs)}
    assert made == transformers_answers(folder)


@pytest.mark.parametrize(
    ("family", "quantize", "near"), [("mixtral", "int8", 0.1), ("llama", "fp8", 1e-4), ("qwen3", "int4", 0.1)]
)
def test_two_ranks_of_quantised_weights_answer_as_one(tmp_path: Path, family: str, quantize: str, near: float) -> None:
    """Each projection in each format, and how far a sum in two parts is from the whole: test_quantised_parts.py.

    Sums in two parts differ by their last bits. By them an input of integer products may be rounded to the next
    integer, which moves log-probabilities by some hundredths. `near`: what they may differ by, and a tie at which
    answers part.
    """
    folder = make_checkpoint(tmp_path, family, intermediate_size=128)  # halves of whole groups
    with_second = [replace(each, params=replace(each.params, logprobs=2)) for each in GREEDY]
    found = []
    for ranks in (1, 2):
        with loaded(folder, ranks, quantize=quantize) as (runner, _):
            found.append(drawn(runner, with_second))
    for one, two in zip(found[0].values(), found[1].values(), strict=True):
        places = range(NEW_TOKENS)
        parted = next((place for place in places if one[place].token_id != two[place].token_id), NEW_TOKENS)
        assert all(abs(one[place].logprob - two[place].logprob) <= near for place in range(parted))
        if parted < NEW_TOKENS:
            first, second = one[parted].top
            assert second.token_id == two[parted].token_id and first.logprob - second.logprob <= near


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_sampled_and_swapped_answers_of_two_ranks_equal_those_of_one(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family)
    with loaded(folder, ranks=1) as (runner, _):
        expected = answer(runner, MIXED)
    with loaded(folder, ranks=2) as (runner, parts):
        assert answer(runner, MIXED, blocks=TIGHT) == expected
        check_moves(runner, parts)
        check_poison(runner, parts)


def check_moves(runner: Runner, parts: torch.Tensor) -> None:
    """Of plans that compute nothing: both ranks have carried them out when they return."""
    parts[:, :4] = torch.randint(256, parts[:, :4].shape, dtype=torch.uint8)
    before = parts.clone()
    assert runner.run(Plan((), (BlockCopy(0, 5), BlockCopy(1, 6)))) == ()
    assert torch.equal(parts[:, 5:7], before[:, 0:2])
    runner.run(Plan((), swaps_out=(BlockSwap(2, 7), BlockSwap(3, 0))))
    parts[:, 2:4] = 0
    runner.run(Plan((), swaps_in=(BlockSwap(2, 0), BlockSwap(8, 7))))
    assert torch.equal(parts[:, [2, 8]], before[:, [3, 2]])
    assert not parts[:, 3].any()


def check_poison(runner: Runner, parts: torch.Tensor) -> None:
    """KV of the second rank that is not finite ends the chunks that read it, and no others."""
    prompt, samples = random_prompt(BLOCK_TOKENS), (Sample(0, SAMPLED),)
    blocks = ((1,), (2, 3))
    runner.run(Plan(tuple(Chunk(number, prompt, 0, table[:1]) for number, table in enumerate(blocks))))
    parts[1, 1] = 0xFF
    clean = Chunk(1, [5], BLOCK_TOKENS, blocks[1], samples)
    spoilt, sound = runner.run(Plan((Chunk(0, [5], BLOCK_TOKENS - 1, blocks[0], samples), clean)))
    assert isinstance(spoilt, NonFinite)
    assert isinstance(sound, Computed)


def test_killed_rank_is_reported_immediately_and_fails_the_next_step(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    with loaded(folder, ranks=2) as (runner, _):
        runner.warm_up()
        assert runner.other_ranks is not None
        lost: queue.SimpleQueue[RankLost] = queue.SimpleQueue()
        runner.other_ranks.watch(lost.put)
        [rank] = runner.other_ranks.processes
        rank.kill()
        assert str(lost.get(timeout=20.0)) == f"rank 1, process {rank.pid}, ended: exit code -9"
        with pytest.raises(RankLost):
            answer(runner, GREEDY)


def test_model_that_cannot_be_cut_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "mistral")
    with pytest.raises(ModelError, match="tensor-parallel is 2, but num_key_value_heads of this model is 1"):
        loaded(folder, ranks=2).__enter__()
