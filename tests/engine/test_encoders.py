"""Vectors and scores of encoders and classification heads equal those of transformers, in whatever batch."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine import LLM
from baton.engine.config.model_config import ModelError
from baton.text.pooler_files import read_pooler
from tests.fixtures.encoders import ENCODERS, POSITIONS, expected_logits, make_encoder
from tests.fixtures.paged import random_prompt
from tests.fixtures.poolers import expected_vectors, furthest, pooling_config, write_dense, write_modules

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "quiet": True,
    "max_num_batched_tokens": 48,  # the longest prompts are longer than that, others share a step
    "kv_cache_memory_bytes": 1 << 20,
    "block_size": 8,
}
PROMPTS = [[1, *random_prompt(tokens, seed=tokens), 2] for tokens in (1, 8, 9, 20, 47, 80, 126)]
PAIRS = [("A query?", "Lorem ipsum"), ("A query?", "dolor sit amet " * 4), ("Other", "x")]
CLOSE = 1e-5


def vectors(folder: Path) -> list[list[float]]:
    return [output.outputs.embedding for output in LLM(str(folder), **OPTIONS).embed(PROMPTS, use_tqdm=False)]


@pytest.mark.parametrize(
    ("family", "mode", "normalises"),
    [*((family, "mean", True) for family in ENCODERS), ("bert", "cls", True), ("bert", "mean", False)],
)
def test_vectors_equal_transformers(family: str, mode: str, normalises: bool, tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model", family, seed=1)
    write_modules(folder, pooling_config(mode), normalises)
    assert furthest(vectors(folder), expected_vectors(folder, PROMPTS, mode, normalises)) < CLOSE


def test_linear_layer_in_a_pipe_is_refused(tmp_path: Path) -> None:
    folder = write_dense(make_encoder(tmp_path / "model", "gemma3_text", seed=1), [torch.zeros(8, 64)])
    weights = folder / "2_Dense" / "model.safetensors"
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(ModelError, match=f"{weights}: not a regular file"):
        LLM(str(folder), **OPTIONS)


def test_vectors_pass_the_linear_layers_of_sentence_transformers(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model", "gemma3_text", seed=1)
    draw = torch.Generator().manual_seed(2)
    weights = [torch.randn(96, 64, generator=draw), torch.randn(24, 96, generator=draw)]
    means = torch.tensor(expected_vectors(folder, PROMPTS, "mean", normalises=False), dtype=torch.float64)
    expected = means @ weights[0].double().T @ weights[1].double().T
    found = vectors(write_dense(folder, weights))
    assert furthest(found, (expected / expected.norm(dim=1, keepdim=True)).tolist()) < CLOSE
    assert read_pooler(folder).size == len(found[0]) == 24


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "camembert", "llama", "qwen3", "gemma2"])
def test_score_is_the_sigmoid_of_the_head(family: str, tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model", family, seed=4, labels=1)
    outputs = LLM(str(folder), **OPTIONS).score(*map(list, zip(*PAIRS, strict=True)), use_tqdm=False)  # type: ignore[arg-type]
    expected = [1 / (1 + math.exp(-logit)) for logit in expected_logits(folder, PAIRS)]
    assert furthest([[output.outputs.score for output in outputs]], [expected]) < CLOSE


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_pair_beyond_the_context_is_cut(family: str, tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model", family, seed=4, labels=1)
    pairs = [("A query?", "dolor sit amet " * 99), ("Lorem ipsum " * 99, "dolor sit amet " * 99)]
    outputs = LLM(str(folder), **OPTIONS).score(*map(list, zip(*pairs, strict=True)), use_tqdm=False)  # type: ignore[arg-type]
    assert [len(output.prompt_token_ids) for output in outputs] == [POSITIONS, POSITIONS]
    expected = [1 / (1 + math.exp(-logit)) for logit in expected_logits(folder, pairs)]
    assert furthest([[output.outputs.score for output in outputs]], [expected]) < CLOSE


def test_default_prompt_precedes_a_text(tmp_path: Path) -> None:
    folder = write_modules(make_encoder(tmp_path / "model", "bert"), pooling_config("cls"), normalises=True)
    before = LLM(str(folder), **OPTIONS).embed("query: a text", use_tqdm=False)
    (folder / "config_sentence_transformers.json").write_text(
        '{"prompts": {"query": "query: "}, "default_prompt_name": "query"}'
    )
    assert LLM(str(folder), **OPTIONS).embed("a text", use_tqdm=False)[0].outputs == before[0].outputs


def test_encoder_makes_no_answers_and_takes_no_more_than_its_positions(tmp_path: Path) -> None:
    llm = LLM(str(make_encoder(tmp_path / "tiny-bge", "xlm-roberta")), **OPTIONS)
    with pytest.raises(ValueError, match="tiny-bge is an encoder, which makes vectors and no answers: use embed"):
        llm.generate("text", use_tqdm=False)
    most = POSITIONS - 1  # its first position is the one behind that of the padding token, which is 0
    assert len(llm.embed([[5] * most], use_tqdm=False)) == 1
    with pytest.raises(ValueError, match=f"at most {most}"):
        llm.embed([[5] * (most + 1)], use_tqdm=False)
