"""Vectors and scores through real processes: they equal transformers', only prefill workers make them, and one of those
that is killed changes none. A colocated service has them too."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from transformers import AutoTokenizer

from baton.client import Load
from tests.e2e.conftest import run
from tests.e2e.stack import Stack, make_stack
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.client_environment import problems
from tests.fixtures.paged import random_prompt
from tests.fixtures.poolers import expected_probability, expected_vectors, furthest, write_logit_score

CHUNK_TOKENS = 64
CLOSE = 1e-5
PROMPTS = [random_prompt(tokens, seed=tokens) for tokens in (1, 16, 63, 64, 65, 700)]
ASKED_TOKENS = 1_000
REPORTED_S = 30.0
YES, NO = 20, 31
JUDGE = """{%- set query = messages | selectattr("role", "eq", "query") | map(attribute="content") | first -%}
{%- set document = messages | selectattr("role", "eq", "document") | map(attribute="content") | first -%}
<|im_start|>system
Judge whether the Document meets the Query. The answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Query>: {{ query }}
<Document>: {{ document }}<|im_end|>
<|im_start|>assistant
<think>

</think>

"""
"""Of the shape that Qwen3-Reranker's has."""
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny-qwen3", "qwen3", seed=21)


@pytest.fixture(scope="module")
def vectors_stack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    flags = ["--chunk-tokens", str(CHUNK_TOKENS)]
    yield from run(make_stack(tmp_path_factory.mktemp("stack"), model, prefill=2, worker_flags=flags))


@pytest.fixture
def stack(vectors_stack: Stack) -> Iterator[Stack]:
    """Stack with all processes running; after the test, all KV pages must be free again."""
    vectors_stack.start([name for name, process in vectors_stack.processes.items() if not process.runs])
    vectors_stack.wait_ready()
    yield vectors_stack
    vectors_stack.wait_idle()


def post(stack: Stack, path: str, **body: Any) -> Any:
    response = httpx2.post(f"{stack.url}{path}", json=body, timeout=TIMEOUT_S, trust_env=False)
    assert response.status_code == 200, response.text
    return response.json()


def vectors_of(answer: Any) -> list[list[float]]:
    assert [each["index"] for each in answer["data"]] == list(range(len(answer["data"])))
    return [each["embedding"] for each in answer["data"]]


def load_of(stack: Stack, worker_id: str) -> Load:
    (found,) = (worker.load for worker in stack.status().workers if worker.worker_id == worker_id)
    assert found is not None
    return found


def reported_steps(stack: Stack, seed: int) -> int:
    """Send a request, and return the decode worker's steps once its own step is reported, and so are all earlier ones.

    Its prompt is longer than all unreported prompts together, so the count of prompt tokens tells when it is reported.
    """
    before = load_of(stack, "decode-0").cache_query_tokens
    post(stack, "/v1/completions", prompt=random_prompt(ASKED_TOKENS, seed=seed), max_tokens=2, ignore_eos=True)
    reports: list[Load] = []

    def has_ended() -> bool:
        reports.append(load_of(stack, "decode-0"))
        return reports[-1].cache_query_tokens >= before + ASKED_TOKENS and reports[-1].pages.held == 0

    stack.wait_for(has_ended, REPORTED_S, "report of an answer")
    return reports[-1].steps


def has_requests(stack: Stack, worker_id: str) -> bool:
    return any(each.in_flight_requests for each in stack.status().workers if each.worker_id == worker_id)


def test_vectors_equal_transformers_and_no_decode_worker_takes_a_step(stack: Stack, model: Path) -> None:
    expected = expected_vectors(model, PROMPTS, "lasttoken", normalises=True)
    before = reported_steps(stack, seed=1)
    answer = post(stack, "/v1/embeddings", input=PROMPTS)
    assert furthest(vectors_of(answer), expected) < CLOSE
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == sum(map(len, PROMPTS))
    again = post(stack, "/v1/embeddings", input=PROMPTS)  # mostly cached
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert furthest(vectors_of(again), expected) < CLOSE
    assert reported_steps(stack, seed=2) == before + 1


def test_openai_client_reads_vectors(stack: Stack) -> None:
    assert problems("openai_client", f"{stack.url}/v1", ["embeddings"]) == []


def test_killed_prefill_worker_changes_no_vector(stack: Stack, model: Path) -> None:
    """It is stopped first, so that it still has its requests when it is killed."""
    prompts = [random_prompt(300, seed=seed) for seed in range(60)]
    victim = stack.processes["prefill-0"]
    victim.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(post, stack, "/v1/embeddings", input=prompts)
        stack.wait_for(lambda: has_requests(stack, "prefill-0"), TIMEOUT_S, "prompt at the one that stands still")
        victim.kill()
        made = asking.result(TIMEOUT_S)
    assert "failed: WORKER_DIED" in stack.processes["router"].text()
    assert furthest(vectors_of(made), expected_vectors(model, prompts, "lasttoken", normalises=True)) < CLOSE


def test_reranker_in_a_colocated_service_gives_the_probability_of_yes(tmp_path: Path) -> None:
    """The checkpoint is like Qwen3-Reranker, whose output weights are its embedding."""
    folder = make_checkpoint(tmp_path / "tiny-reranker", "qwen3", seed=23, tie_word_embeddings=True)
    (write_logit_score(folder, YES, NO) / "chat_template.jinja").write_text(JUDGE)
    query, texts = "A query?", ["One text", "another " * 30]
    with contextmanager(run)(make_stack(tmp_path / "stack", folder, prefill=0)) as stack:
        made = post(stack, "/v1/score", text_1=query, text_2=texts)
        ranked = post(stack, "/v1/rerank", query=query, documents=texts)["results"]
        stack.wait_idle()
    tokenizer, expected = AutoTokenizer.from_pretrained(folder), []
    for text in texts:
        pair = [{"role": "query", "content": query}, {"role": "document", "content": text}]
        prompt = tokenizer.apply_chat_template(pair, add_generation_prompt=True, return_dict=False)
        expected.append(expected_probability(folder, prompt, YES, NO))
    assert furthest([[each["score"] for each in made["data"]]], [expected]) < CLOSE
    assert [each["index"] for each in ranked] == sorted((0, 1), key=lambda place: -expected[place])
