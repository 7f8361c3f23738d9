"""Log-probabilities of the prompt, in whatever chunks it is computed; and the best of several answers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.engine import LLM, RequestOutput, SamplingParams
from baton.engine.request import Chunk, NonFinite, Plan, Sample, Scored
from baton.engine.runner import runner as runners
from baton.engine.sampling.params import SamplingParams as EngineParams
from baton.engine.sampling.sampler import ROWS_AT_ONCE, prompt_scores
from tests.fixtures.paged import PagedModel, random_prompt

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "quiet": True, "max_model_len": 256}


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), kv_cache_memory_bytes=4 << 20, max_num_batched_tokens=33, block_size=8, **OPTIONS)


def transformers_logprobs(checkpoint: Path, prompt: list[int]) -> torch.Tensor:
    """`[tokens - 1, vocab]`: row i is of the token at i + 1."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        return torch.as_tensor(model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1))


def test_every_prompt_token_has_the_logprob_that_transformers_gives_it(llm: LLM, checkpoint: Path) -> None:
    prompt = random_prompt(150)
    [output] = llm.generate(prompt, SamplingParams(max_tokens=2, prompt_logprobs=3), use_tqdm=False)
    told = output.prompt_logprobs
    assert told is not None and told[0] is None and len(told) == len(prompt)
    wanted = transformers_logprobs(checkpoint, prompt)
    for token_id, entry, row in zip(prompt[1:], told[1:], wanted, strict=True):
        assert entry is not None
        assert entry[token_id].logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        ranked = sorted((each for each in entry.values() if each.rank is not None), key=lambda each: each.rank or 0)
        torch.testing.assert_close(torch.tensor([e.logprob for e in ranked]), row.topk(3).values, rtol=0, atol=1e-4)


def test_prompt_in_the_cache_is_scored_as_a_new_one(llm: LLM) -> None:
    prompt, params = random_prompt(120, seed=1), SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=0)
    [first] = llm.generate(prompt, params, use_tqdm=False)
    [again] = llm.generate(prompt, params, use_tqdm=False)
    assert again.num_cached_tokens == 0
    assert again.prompt_logprobs == first.prompt_logprobs
    [plain] = llm.generate(prompt, SamplingParams(max_tokens=2, temperature=0.0), use_tqdm=False)
    assert plain.num_cached_tokens > 0 and plain.prompt_logprobs is None
    assert plain.outputs[0].token_ids == first.outputs[0].token_ids


def test_scores_of_preempted_prompts_are_returned_once(checkpoint: Path, llm: LLM) -> None:
    small = LLM(
        str(checkpoint),
        kv_cache_memory_bytes=36 * llm.sizing.block_bytes,
        block_size=8,
        max_num_batched_tokens=40,
        **OPTIONS,
    )
    prompts = [random_prompt(60, seed=seed) for seed in range(6)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
    outputs = small.generate(prompts, params, use_tqdm=False)
    assert small.preemptions > 0
    for output, wanted in zip(outputs, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert chosen(output) == pytest.approx(chosen(wanted), abs=1e-4)


def chosen(output: RequestOutput) -> list[float]:
    """Log-probabilities of the prompt's own tokens."""
    assert output.prompt_logprobs is not None
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    return [entry[token_id].logprob for token_id, entry in pairs if entry is not None]


def test_logits_exist_a_few_rows_at_a_time() -> None:
    rows_seen: list[int] = []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        rows_seen.append(len(hidden))
        return hidden

    hidden = torch.randn(2 * ROWS_AT_ONCE + 9, 32)
    token_ids = [index % 32 for index in range(2 * ROWS_AT_ONCE + 8)]
    told = prompt_scores(logits, hidden, Scored(token_ids, 2))
    assert told is not None
    assert rows_seen == [ROWS_AT_ONCE, ROWS_AT_ONCE, 8]
    wanted = hidden.log_softmax(-1)[range(len(token_ids)), token_ids]
    torch.testing.assert_close(torch.tensor([each.logprob for each in told]), wanted)


def test_scores_that_are_not_finite_fail_the_chunk(checkpoint: Path) -> None:
    paged = PagedModel(checkpoint)
    prompt = random_prompt(40)
    chunk = Chunk(1, prompt, 0, paged.blocks(40), scored=Scored(prompt[1:], 0))
    [fine] = paged.runner.run(Plan((chunk,)))
    assert not isinstance(fine, NonFinite) and len(fine.prompt) == 39
    assert prompt_scores(lambda rows: rows / 0.0, torch.ones(3, 8), Scored([1, 2], 0)) is None


def test_chunk_with_a_late_mask_has_its_scores(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = PagedModel(checkpoint)
    prompt = random_prompt(40)
    chunk = Chunk(
        1, prompt, 0, paged.blocks(41), (Sample(0, EngineParams(max_tokens=1)),), scored=Scored(prompt[1:], 0)
    )
    monkeypatch.setattr(runners, "sample_each", lambda logits, rows, clock: [None for _ in rows])
    [computed] = paged.runner.run(Plan((chunk,)))
    assert not isinstance(computed, NonFinite)
    assert computed.late and len(computed.prompt) == 39


def test_best_of_several_answers_are_the_likeliest_per_token(llm: LLM) -> None:
    shared: dict[str, Any] = {"temperature": 1.5, "seed": 5, "max_tokens": 12, "ignore_eos": True}
    [everything] = llm.generate("Badega", SamplingParams(n=6, **shared), use_tqdm=False)
    [best] = llm.generate("Badega", SamplingParams(n=2, best_of=6, **shared), use_tqdm=False)
    ranked = sorted(everything.outputs, key=lambda each: each.cumulative_logprob / len(each.token_ids), reverse=True)
    assert [each.token_ids for each in best.outputs] == [each.token_ids for each in ranked[:2]]
    assert [each.index for each in best.outputs] == [0, 1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n": 3, "best_of": 2}, "best_of: must be from n, 3, to 256, not 2"),
        ({"best_of": 1000}, "best_of: must be from n, 1, to 256, not 1000"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be at least 0"),
    ],
)
def test_impossible_value_is_rejected_by_field(llm: LLM, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate("Badega", SamplingParams(**wrong), use_tqdm=False)
