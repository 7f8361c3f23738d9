"""Offline use: many prompts at once answer as transformers answers each alone."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import baton
from baton.engine import LLM, AsyncLLM, RequestOutput, SamplingParams
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import random_prompt, unlikely
from tests.fixtures.seeds import seed_of_choice

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "quiet": True, "max_num_batched_tokens": 96}


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(str(tiny), kv_cache_memory_bytes=8 << 20, max_model_len=256, **OPTIONS)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_forty_prompts_in_a_small_pool_equal_transformers(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / family, family, seed=5)
    draw = random.Random(1)
    shared = random_prompt(50)
    prompts = [random_prompt(draw.randrange(1, 90), seed=seed) for seed in range(30)]
    prompts += [shared + random_prompt(draw.randrange(1, 30), seed=seed) for seed in range(10)]
    block_tokens = 8
    engine = LLM(str(folder), kv_cache_memory_bytes=1 << 30, max_model_len=160, block_size=block_tokens, **OPTIONS)
    block_bytes = engine.sizing.block_bytes
    small = LLM(
        str(folder), kv_cache_memory_bytes=40 * block_bytes, max_model_len=160, block_size=block_tokens, **OPTIONS
    )
    outputs = small.generate(prompts, replace(GREEDY, max_tokens=24), use_tqdm=False)
    assert small.preemptions > 0
    answers = [output.outputs[0].token_ids for output in outputs]
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert unlikely(expected, prompt, answer) == []
    assert {len(answer) for answer in answers} == {24}
    assert any(output.num_cached_tokens for output in outputs[30:])
    assert [output.prompt_token_ids for output in outputs] == prompts


def test_eight_choices_equal_eight_single_requests(llm: LLM) -> None:
    prompt = random_prompt(45)
    params = {"temperature": 1.0, "max_tokens": 32, "ignore_eos": True}
    [together] = llm.generate(prompt, SamplingParams(n=8, seed=77, **params), use_tqdm=False)
    singles = [SamplingParams(seed=seed_of_choice(77, choice), **params) for choice in range(8)]
    alone = llm.generate([prompt] * 8, singles, use_tqdm=False)
    assert [choice.token_ids for choice in together.outputs] == [output.outputs[0].token_ids for output in alone]
    assert len({tuple(choice.token_ids) for choice in together.outputs}) == 8
    assert [choice.index for choice in together.outputs] == list(range(8))


def test_same_tokens_with_and_without_prefix_cache(llm: LLM, tiny: Path) -> None:
    uncached = LLM(str(tiny), kv_cache_memory_bytes=8 << 20, max_model_len=256, enable_prefix_caching=False, **OPTIONS)
    prompts = [[*random_prompt(100), token] for token in range(5, 9)]
    for _ in range(2):
        first, second = (each.generate(prompts, GREEDY, use_tqdm=False) for each in (llm, uncached))
        assert [output.outputs[0].token_ids for output in first] == [output.outputs[0].token_ids for output in second]
    assert [output.num_cached_tokens for output in first] == [96] * 4
    assert [output.num_cached_tokens for output in second] == [0] * 4


def test_unseeded_request_is_random_and_reproducible_by_engine_seed(tiny: Path) -> None:
    def run(seed: int) -> list[list[int]]:
        engine = LLM(str(tiny), kv_cache_memory_bytes=1 << 20, seed=seed, **OPTIONS)
        outputs = engine.generate([[5, 6, 7]] * 3, SamplingParams(max_tokens=8), use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    first = run(0)
    assert len({tuple(answer) for answer in first}) == 3
    assert run(0) == first
    assert run(1) != first


def test_prompts_are_accepted_in_every_form_of_vllm(llm: LLM) -> None:
    text = "Hello, world"
    token_ids = llm.get_tokenizer().encode(text)
    forms: list[Any] = [text, {"prompt": text}, token_ids, {"prompt_token_ids": token_ids}]
    outputs = [llm.generate(form, GREEDY, use_tqdm=False)[0] for form in forms]
    outputs += llm.generate(forms, GREEDY, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.prompt for output in outputs] == [text, text, None, None] * 2
    assert all(output.prompt_token_ids == token_ids and output.finished for output in outputs)


def test_chat_goes_through_the_template(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    messages = [{"role": "user", "content": "Hello"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    token_ids = tokenizer.encode(prompt, add_special_tokens=False)
    [single] = llm.chat(messages, GREEDY, use_tqdm=False)
    several = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert {tuple(output.prompt_token_ids) for output in [single, *several]} == {tuple(token_ids)}
    assert single.outputs[0].token_ids == several[1].outputs[0].token_ids


def test_hundreds_of_prompts_are_answered_in_order(llm: LLM) -> None:
    prompts = [[3 + number] for number in range(400)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [output.request_id for output in outputs] == [str(number) for number in range(400)]


def test_bar_shows_tokens_per_second(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([[5, 6]], GREEDY)
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown
    assert "input: " in shown and "output: " in shown and "toks/s" in shown


def test_closed_iterator_frees_everything(llm: LLM) -> None:
    prompts = [llm.read([5, 6, 7 + number]) for number in range(4)]
    lengths = [SamplingParams(temperature=0.0, max_tokens=5 + 20 * number) for number in range(4)]
    iterator = llm.finished(prompts, lengths)
    output = next(iterator)
    assert isinstance(output, RequestOutput) and output.request_id == "0"
    iterator.close()
    assert not llm._engine.scheduler.has_work
    assert llm._engine.scheduler.pool.counts.held == 0


def test_package_alone_loads_nothing_heavy() -> None:
    import subprocess
    import sys

    code = "import baton, baton.engine, sys; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=300)
    assert baton.LLM is LLM and baton.AsyncLLM is AsyncLLM  # loaded when they are asked for
