"""A reranker with a classification head and an encoder on a real stack: prefill workers alone serve them."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.conftest import run
from tests.e2e.stack import Stack, make_stack
from tests.e2e.test_vectors_live import TIMEOUT_S, post, vectors_of
from tests.fixtures.encoders import expected_logits, make_encoder
from tests.fixtures.paged import random_prompt
from tests.fixtures.poolers import expected_vectors, furthest, pooling_config, write_modules

CLOSE = 1e-5
PROMPTS = [[1, *random_prompt(tokens, seed=tokens), 2] for tokens in (1, 16, 80, 126)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_encoder(tmp_path_factory.mktemp("model") / "tiny-bge", "xlm-roberta", seed=21)
    return write_modules(folder, pooling_config("cls"), normalises=True)


@pytest.fixture(scope="module")
def stack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    yield from run(make_stack(tmp_path_factory.mktemp("stack"), model, prefill=1, decode=0))


def test_vectors_equal_transformers_and_chat_is_refused(stack: Stack, model: Path) -> None:
    made = vectors_of(post(stack, "/v1/embeddings", input=PROMPTS))
    assert furthest(made, expected_vectors(model, PROMPTS, "cls", normalises=True)) < CLOSE
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
    refused = httpx2.post(f"{stack.url}/v1/chat/completions", json=body, timeout=TIMEOUT_S, trust_env=False)
    assert refused.status_code == 400
    assert "tiny-bge (xlm-roberta) is an encoder, which makes vectors and no answers" in refused.text


def test_reranker_scores_pairs(tmp_path: Path) -> None:
    folder, texts = make_encoder(tmp_path / "tiny-reranker", "bert", seed=22, labels=1), ["One text", "another " * 3]
    with contextmanager(run)(make_stack(tmp_path / "stack", folder, prefill=1, decode=0)) as stack:
        made = post(stack, "/v1/score", text_1="A query?", text_2=texts)["data"]
    expected = [1 / (1 + math.exp(-logit)) for logit in expected_logits(folder, [("A query?", text) for text in texts])]
    assert furthest([[each["score"] for each in made]], [expected]) < CLOSE
