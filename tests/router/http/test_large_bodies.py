"""Large bodies: parsed where nobody waits for a token, to the same messages and the same refusals."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import BaseModel

from baton.process.helper import Buffer, HelperBusy, HelperFailed
from baton.router.http import parse_process
from baton.router.http.edge.exchange import BodyReader
from baton.router.http.edge.problem import Problem
from baton.router.http.messages import MESSAGES, ChatRequest, CompletionRequest, DetokenizeRequest
from baton.router.http.parse import SMALL_BYTES, parse
from baton.router.http.parse_process import pack, unpack
from baton.router.http.responses.bodies import ResponseRequest
from baton.router.http.vectors.bodies import EmbeddingRequest, RerankRequest
from tests.router.http.conftest import Gateway

PATH = "/v1/completions"
MEGABYTE = 1 << 20
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "deep": [{"a": None}]}}}
SAID = [{"role": "user", "content": f"{index} \u4e2d\n\U0001f600"} for index in range(1000)]

LARGE: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "text": (CompletionRequest, {"prompt": 'wo"rd\\\n\u4e2d' * 20_000, "seed": 2**64 - 1, "metadata": {"a": [1] * 9}}),
    "texts": (CompletionRequest, {"prompt": ["a" * 9000, "", "\u4e2d" * 9000], "stop": ["x"] * 600}),
    "token ids": (CompletionRequest, {"prompt": [*range(2000), 2**32 - 1], "logit_bias": {"5": 1.5}}),
    "lists of token ids": (CompletionRequest, {"prompt": [[1] * 600, [], [2, 3]]}),
    "messages": (ChatRequest, {"messages": SAID, "tools": [TOOL], "temperature": 0.5}),
    "a long message": (ChatRequest, {"messages": [{"role": "user", "content": "a" * 100_000}]}),
    "parts": (ResponseRequest, {"input": [{"role": "user", "content": [{"type": "text", "text": "a"}]}] * 300}),
    "inputs": (EmbeddingRequest, {"input": [[1] * 600, [2, 3]], "dimensions": 7}),
    "documents": (RerankRequest, {"query": "a" * 20_000, "documents": ["a" * 9000, "", "b" * 9000]}),
    "tokens": (DetokenizeRequest, {"tokens": [7] * 5000}),
    "a schema": (
        CompletionRequest,
        {
            "prompt": "a",
            "response_format": {"type": "json_schema", "json_schema": {"schema": {str(i): {} for i in range(999)}}},
        },
    ),
}


def through(message_type: type[BaseModel], body: bytes) -> BaseModel:
    return unpack(message_type, memoryview(b"".join(pack(message_type, body))))


def plain(value: Any) -> Any:
    """Arrays as lists."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


@pytest.mark.parametrize("name", LARGE)
def test_parsed_message_round_trips(name: str) -> None:
    message_type, sent = LARGE[name]
    body = json.dumps(sent).encode()

    found, expected = through(message_type, body), parse(message_type, body)

    assert plain(dict(found)) == plain(dict(expected))
    assert found.model_fields_set == expected.model_fields_set


def test_nonfinite_numbers_round_trip() -> None:
    found = through(CompletionRequest, b'{"prompt": "' + b"a" * 20_000 + b'", "temperature": NaN, "top_p": 1e999}')

    assert isinstance(found, CompletionRequest) and found.temperature != found.temperature
    assert found.top_p == float("inf")


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"prompt": "' + b"a" * 100_000,
        b'{"prompt": [' + b"1," * 100_000 + b'"x"]}',
        b'{"prompt": [' + b"1," * 1_000_000 + b"1]}",
        b'{"prompt": "' + b"a" * 100_000 + b'", "n": "many"}',
        b'{"prompt": "' + b"a" * 100_000 + b'", "temprature": 1}',
        b'{"prompt": "a", "suffix": "' + b"a" * 100_000 + b'"}',
        b'{"prompt": "\\ud800' + b"a" * 100_000 + b'"}',
    ],
    ids=["nested", "cut off", "mixed", "too many tokens", "wrong type", "typo", "unserved", "half a character"],
)
def test_rejection_round_trips(body: bytes) -> None:
    with pytest.raises(Problem) as expected:
        parse(CompletionRequest, body)
    with pytest.raises(Problem) as found:
        through(CompletionRequest, body)

    assert (found.value.status, found.value.content) == (expected.value.status, expected.value.content)


@pytest.mark.parametrize("wrong", [-1, 2**32, 10**30])
def test_invalid_token_id_is_named(wrong: int) -> None:
    with pytest.raises(Problem) as found:
        through(CompletionRequest, json.dumps({"prompt": [1] * 1000 + [wrong]}).encode())

    assert found.value.param == "prompt[1000]"


def test_all_messages_are_known_to_the_process_under_their_names() -> None:
    """Fields are taken out by the names that they have in a body."""
    for message_type in MESSAGES:
        assert all(field.alias is None for field in message_type.model_fields.values())


FULL = [
    b'{"prompt": [' + b"1," * 100_000 + b'"x"]}',
    b'{"prompt": "' + b"a" * MEGABYTE,
    b"[" * 100_000,
    b"{" + b",".join(b'"%d":1' % number for number in range(5000)) + b"}",  # in few bytes
]


async def test_large_or_dense_bodies_are_not_parsed_on_the_event_loop(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    here: list[int] = []

    def spied(message_type: type[BaseModel], body: bytes) -> BaseModel:
        here.append(len(body))
        return parse(message_type, body)

    monkeypatch.setattr(parse_process, "parse", spied)

    for body in FULL:
        response = await gateway.client.post(PATH, content=body)

        assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"
    assert not here
    assert (await gateway.client.post(PATH, json={"prompt": "a", "max_tokens": 1})).status_code == 200
    assert here and max(here) <= SMALL_BYTES


async def test_large_body_is_answered(gateway: Gateway) -> None:
    padded = {"prompt": [5] * 1000, "max_tokens": 1, "user": "a" * SMALL_BYTES}

    assert (await gateway.post(PATH, **padded))["usage"]["prompt_tokens"] == 1000


async def test_large_response_with_many_token_ids_is_answered(gateway: Gateway) -> None:
    many = {"allowed_token_ids": [5] * 600, "max_output_tokens": 16, "user": "a" * SMALL_BYTES}

    assert (await gateway.post("/v1/responses", input="a", **many))["object"] == "response"


async def test_too_long_large_text_is_rejected(gateway: Gateway) -> None:
    error = await gateway.refused(PATH, prompt="a" * MEGABYTE)

    assert error["code"] == "context_length_exceeded"


async def test_many_tokens_round_trip(gateway: Gateway) -> None:
    text = "ab\u4e2d" * 2000

    told = await gateway.post("/tokenize", prompt=text, return_token_strs=True)

    assert told["count"] == len(told["tokens"]) == len(told["token_strs"]) > 1 << 13
    assert (await gateway.post("/detokenize", tokens=told["tokens"]))["prompt"] == text
    error = await gateway.refused("/detokenize", tokens=[*told["tokens"], 1 << 20])
    assert error["param"] == f"tokens[{told['count']}]"


class Unhelpful:
    def __init__(self, error: Exception) -> None:
        self._error = error

    async def ask(self, parts: Sequence[Buffer]) -> bytearray:
        raise self._error

    def close(self) -> None:
        pass


@pytest.mark.parametrize("error", [HelperBusy(), HelperFailed()])
async def test_without_help_a_large_body_is_refused_for_now(error: Exception) -> None:
    unhelped = parse_process.Parser(Unhelpful(error))
    with pytest.raises(Problem) as refused:
        await unhelped.parse(CompletionRequest, [b" " * SMALL_BYTES, b"{}"])
    unhelped.close()

    assert refused.value.status == 503 and refused.value.retry_after_s is not None


async def test_body_counts_until_it_is_released() -> None:
    reader = BodyReader(max_bytes=100, all_bytes=100, timeout_s=10)
    parts = asyncio.Queue[dict[str, Any]]()
    for more in (True, False):
        parts.put_nowait({"type": "http.request", "body": b"ab", "more_body": more})

    with await reader.read({}, parts.get) as body:  # type: ignore[arg-type]
        assert (b"".join(body.parts), reader.held_bytes) == (b"abab", 4)
        body.release()
        assert reader.held_bytes == 0

    assert reader.held_bytes == 0
