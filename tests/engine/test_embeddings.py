"""Offline vectors and scores equal those of transformers, in whatever chunks and with whatever is cached."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModel, AutoTokenizer

from baton.engine import LLM, PoolingParams, SamplingParams
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import random_prompt
from tests.fixtures.poolers import (
    expected_probability,
    expected_vectors,
    furthest,
    pooling_config,
    write_logit_score,
    write_modules,
)

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "quiet": True,
    "max_num_batched_tokens": 48,  # most of the prompts take several chunks
    "kv_cache_memory_bytes": 8 << 20,
    "max_model_len": 256,
    "block_size": 8,
}
PROMPTS = [random_prompt(tokens, seed=tokens) for tokens in (1, 8, 9, 47, 130, 256)]
CLOSE = 1e-5


def vectors(llm: LLM, prompts: Sequence[Sequence[int]], **params: Any) -> list[list[float]]:
    outputs = llm.embed(list(prompts), PoolingParams(**params), use_tqdm=False)
    return [output.outputs.embedding for output in outputs]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2"])
def test_last_token_vectors_equal_transformers(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / family, family, seed=3)
    made = vectors(LLM(str(folder), **OPTIONS), PROMPTS)
    assert furthest(made, expected_vectors(folder, PROMPTS, "lasttoken", normalises=True)) < CLOSE


@pytest.mark.parametrize("normalises", [True, False])
@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
def test_checkpoint_says_how_its_vectors_are_pooled(mode: str, normalises: bool, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3", seed=4)
    write_modules(folder, pooling_config(mode), normalises)
    made = vectors(LLM(str(folder), **OPTIONS), PROMPTS)
    assert furthest(made, expected_vectors(folder, PROMPTS, mode, normalises)) < CLOSE


@pytest.mark.parametrize("mode", ["mean", "lasttoken"])
def test_cached_prefix_changes_no_vector(mode: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", seed=5)
    write_modules(folder, pooling_config(mode), normalises=True)
    llm, shared = LLM(str(folder), **OPTIONS), random_prompt(64, seed=1)
    prompts = [shared + random_prompt(tail, seed=tail) for tail in (1, 7, 20)]
    llm.generate([[*shared, 5]], SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)
    outputs = llm.embed(prompts, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [64 if mode == "lasttoken" else 0] * 3
    made = [output.outputs.embedding for output in outputs]
    assert furthest(made, expected_vectors(folder, prompts, mode, normalises=True)) < CLOSE


def test_embedded_prompt_is_found_by_an_answer(tmp_path: Path) -> None:
    llm, prompt = LLM(str(make_checkpoint(tmp_path / "model", "llama")), **OPTIONS), random_prompt(64, seed=1)
    llm.embed([prompt], use_tqdm=False)
    (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)
    assert output.num_cached_tokens == 56


def test_all_blocks_are_free_when_the_vectors_are_there(tmp_path: Path) -> None:
    llm = LLM(str(make_checkpoint(tmp_path / "model", "llama")), **OPTIONS)
    llm.embed(PROMPTS, use_tqdm=False)
    counts = llm._engine.scheduler.pool.counts
    assert counts.held == 0 and not llm._engine.scheduler.batch.requests


def test_dimensions_cut_a_vector_which_is_normalised_then(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    llm = LLM(str(folder), **OPTIONS)
    whole, (made,) = (
        expected_vectors(folder, PROMPTS[-1:], "lasttoken", False)[0],
        vectors(llm, PROMPTS[-1:], dimensions=5),
    )
    length = math.hypot(*whole[:5])
    assert furthest([made], [[number / length for number in whole[:5]]]) < CLOSE
    with pytest.raises(ValueError, match="dimensions: must be from 1 to 64, not 65"):
        vectors(llm, PROMPTS[-1:], dimensions=65)


def test_checkpoint_that_was_saved_without_its_head_is_read(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3", seed=6, tie_word_embeddings=True)
    expected = expected_vectors(folder, PROMPTS, "lasttoken", normalises=True)
    AutoModel.from_pretrained(folder).save_pretrained(folder)
    assert furthest(vectors(LLM(str(folder), **OPTIONS), PROMPTS), expected) < CLOSE


def test_too_long_prompt_is_rejected(tmp_path: Path) -> None:
    llm = LLM(str(make_checkpoint(tmp_path / "model", "llama")), **OPTIONS)
    with pytest.raises(ValueError, match="prompt: 257 tokens; at most 256"):
        llm.embed([random_prompt(257)], use_tqdm=False)


def test_score_of_an_embedding_model_is_the_cosine(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    query, *texts = [list(prompt) for prompt in PROMPTS[2:5]]
    outputs = LLM(str(folder), **OPTIONS).score(query, texts, use_tqdm=False)
    first, *others = expected_vectors(folder, [query, *texts], "lasttoken", normalises=True)
    expected = [sum(a * b for a, b in zip(first, other, strict=True)) for other in others]
    assert furthest([[output.outputs.score for output in outputs]], [expected]) < CLOSE


def test_rerankers_score_is_the_probability_of_its_token(tmp_path: Path) -> None:
    folder = write_logit_score(make_checkpoint(tmp_path / "model", "qwen3"), true_token_id=20, false_token_id=31)
    llm, tokenizer = LLM(str(folder), **OPTIONS), AutoTokenizer.from_pretrained(folder)
    texts = ["Lorem ipsum", "dolor sit amet " * 3]
    outputs = llm.score("A query?", texts, use_tqdm=False)
    for text, output in zip(texts, outputs, strict=True):
        messages = [{"role": "query", "content": "A query?"}, {"role": "document", "content": text}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert output.prompt_token_ids == prompt
        assert abs(output.outputs.score - expected_probability(folder, prompt, 20, 31)) < CLOSE
    with pytest.raises(ValueError, match="the model is a reranker"):
        llm.embed("text", use_tqdm=False)
