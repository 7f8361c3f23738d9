"""POST /v1/embeddings, /v1/score and /v1/rerank: forms of inputs and answers, and refusals by the names of clients."""

import base64
import struct
from typing import Any

import pytest

from tests.router.http.conftest import Gateway

PATH = "/v1/embeddings"


def unit(*numbers: float) -> Any:
    length = sum(number * number for number in numbers) ** 0.5
    return pytest.approx([number / length for number in numbers])


async def test_every_form_of_input_is_accepted(gateway: Gateway) -> None:
    forms: list[tuple[Any, list[int]]] = [
        ([5, 6, 7], [3]), ([[5, 6], [7, 8, 9]], [2, 3]), ("hi", [2]), (["hi", "ho!"], [2, 3]),
    ]  # fmt: skip
    for given, tokens in forms:
        answer = await gateway.post(PATH, input=given)
        assert [each["index"] for each in answer["data"]] == list(range(len(tokens)))
        assert {each["object"] for each in answer["data"]} == {"embedding"} and answer["object"] == "list"
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == sum(tokens)
        assert answer["model"] == "tiny"


async def test_numbers_are_floats_or_little_endian_base64(gateway: Gateway) -> None:
    plain = (await gateway.post(PATH, input=[5, 6, 7]))["data"][0]["embedding"]
    packed = (await gateway.post(PATH, input=[5, 6, 7], encoding_format="base64"))["data"][0]["embedding"]
    assert plain == unit(3.0, 7.0, 1.0)
    assert list(struct.unpack("<3f", base64.b64decode(packed))) == pytest.approx(plain)


async def test_dimensions_are_cut_before_the_length_is_made_one(gateway: Gateway) -> None:
    answer = await gateway.post(PATH, input=[5, 6, 7], dimensions=2)
    assert answer["data"][0]["embedding"] == unit(3.0, 7.0)


async def test_scores_are_cosines_of_one_text_with_each_or_pair_by_pair(gateway: Gateway) -> None:
    one = await gateway.post("/v1/score", text_1="a", text_2=["a", "bb"])
    assert [each["index"] for each in one["data"]] == [0, 1]
    assert one["data"][0]["score"] == pytest.approx(1.0) and one["data"][1]["score"] < 1.0
    pairs = await gateway.post("/v1/score", text_1=["a", "bb"], text_2=["a", "bb"])
    assert [each["score"] for each in pairs["data"]] == [pytest.approx(1.0)] * 2
    error = await gateway.refused("/v1/score", text_1=["a", "b"], text_2=["a"] * 3)
    assert error["message"] == "text_1: must be 1, or one per document (3), not 2"


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
async def test_documents_are_ranked_best_first(gateway: Gateway, path: str) -> None:
    documents = ["bbbb", "a", "cc"]
    ranked = (await gateway.post(path, query="a", documents=documents))["results"]
    assert ranked[0] == {"index": 1, "document": {"text": "a"}, "relevance_score": pytest.approx(1.0)}
    scores = [each["relevance_score"] for each in ranked]
    assert scores == sorted(scores, reverse=True) and len(scores) == 3
    best = (await gateway.post(path, query="a", documents=documents, top_n=1, return_documents=False))["results"]
    assert best == [{"index": 1, "relevance_score": pytest.approx(1.0)}]
    assert (await gateway.refused(path, query="a", documents=[]))["param"] == "documents"


async def test_each_input_counts_as_a_request_without_an_answer(gateway: Gateway) -> None:
    counts = gateway.process.dispatcher.accounts.counts
    before = counts.started
    await gateway.post(PATH, input=["a", "b", "c"])
    assert counts.started - before == 3 and counts.running == 0
    assert counts.prompt_tokens["tiny"] == 3 and counts.generated_tokens["tiny"] == 0
    text = (await gateway.client.get("/metrics")).text
    assert 'vllm:prompt_tokens_total{engine="router",model_name="tiny"} 3.0' in text
    labels = '{engine="router",model_name="tiny"}'
    assert f"vllm:time_to_first_token_seconds_count{labels} 0.0" in text  # a vector is no first token
    assert f"vllm:request_prompt_tokens_count{labels} 3.0" in text
