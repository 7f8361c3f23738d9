"""Fields of other servers over HTTP: served under their names, accepted where they do nothing, or refused by name."""

import json
from itertools import product
from typing import Any

import pytest
from pydantic import BaseModel

from baton.protos import sampling_pb2
from baton.router.http.messages import ChatRequest, CompletionRequest, GenerateRequest
from baton.router.http.requests import HttpCall, completion_requests, kept_for_s
from baton.router.http.responses.bodies import ResponseRequest
from baton.router.public.access import Caller
from tests.router.http.conftest import Gateway
from tests.router.test_template_traces import QWEN

CHAT, TEXT, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 4},
    TEXT: {"prompt": "hi", "max_tokens": 4},
    RESPONSE: {"input": "hi", "max_output_tokens": 4},
    f"{RESPONSE}/compact": {"input": "hi"},
    "/generate": {"prompt": "hi", "max_tokens": 4},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
    "/v1/messages": {"messages": HI, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": HI},
    "/api/chat": {"messages": HI, "options": {"num_predict": 4}},
    "/api/generate": {"prompt": "hi", "options": {"num_predict": 4}},
    "/api/embed": {"input": "hi"},
    "/api/show": {"model": "tiny"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/score": {"text_1": "hi", "text_2": ["ho"]},
    "/v1/rerank": {"query": "hi", "documents": ["ho"]},
    "/rerank": {"query": "hi", "documents": ["ho"]},
}
ERRORS = {"Error", "AnthropicError", "OllamaError"}
HARMLESS: dict[str, Any] = {
    "include": ["reasoning.encrypted_content"],
    "user": "me",
    "safety_identifier": "me",
    "metadata": {"a": "b"},
    "client_metadata": {"turn": "1"},
    "prompt_cache_options": {"mode": "explicit"},
    "context_management": [{"type": "compaction"}],
    "store": True,
    "service_tier": "priority",
    "verbosity": "low",
    "prediction": {"type": "content", "content": "x"},
    "max_tool_calls": 3,
    "guided_decoding_backend": "outlines",
}
ROUTES: dict[str, type[BaseModel]] = {
    CHAT: ChatRequest,
    TEXT: CompletionRequest,
    RESPONSE: ResponseRequest,
    "/generate": GenerateRequest,
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
COMPACT = json.dumps(SCHEMA, separators=(",", ":"))
FORMS: list[tuple[str, Any, int, str]] = [
    ("json", SCHEMA, sampling_pb2.STRUCTURED_KIND_JSON_SCHEMA, COMPACT),
    ("json", json.dumps(SCHEMA), sampling_pb2.STRUCTURED_KIND_JSON_SCHEMA, COMPACT),
    ("regex", "[0-9]{4}", sampling_pb2.STRUCTURED_KIND_REGEX, "[0-9]{4}"),
    ("choice", ["yes", "no"], sampling_pb2.STRUCTURED_KIND_CHOICE, '["yes", "no"]'),
    ("grammar", 'start: "a"', sampling_pb2.STRUCTURED_KIND_GRAMMAR, 'start: "a"'),
    ("json_object", True, sampling_pb2.STRUCTURED_KIND_JSON_OBJECT, ""),
]


def said(path: str, answer: Any) -> Any:
    return answer["output"][0]["content"] if path == RESPONSE else answer["text" if path == "/generate" else "choices"]


def message_of(error: Any) -> str:
    """Ollama's errors are texts."""
    message: str = error if isinstance(error, str) else error["message"]
    return message


async def test_every_route_rejects_unknown_fields(gateway: Gateway) -> None:
    document = (await gateway.client.get("/openapi.json")).json()
    posts = [path for path, operations in document["paths"].items() if "post" in operations]
    assert sorted(posts) == sorted(ASKED)
    for path, body in ASKED.items():
        assert (await gateway.client.post(path, json=body)).status_code == 200
        error = await gateway.refused(path, **body, no_such_field=1)
        assert message_of(error).startswith("no_such_field: unknown field")


async def test_harmless_field_is_accepted_and_changes_nothing(gateway: Gateway) -> None:
    for path, message in ROUTES.items():
        plain = said(path, await gateway.post(path, **ASKED[path], seed=1))
        for name, field in message.model_fields.items():
            if (field.description or "").startswith("accepted, does nothing"):
                given = {name: HARMLESS[name]}
                assert said(path, await gateway.post(path, **ASKED[path], seed=1, **given)) == plain, (path, name)


async def test_vllms_older_names_of_forms_are_served(gateway: Gateway) -> None:
    gateway.pair.script = lambda prompt, choice: [5]
    for path, (name, value, kind, text) in product(ROUTES, FORMS):
        for fields in ({f"guided_{name}": value}, {"structured_outputs": {name: value}}):
            await gateway.post(path, **ASKED[path], **fields, guided_decoding_backend="outlines")
            asked = gateway.prefill.sampling.structured
            assert (asked.kind, asked.text) == (kind, text), fields


async def test_workers_receive_the_draft_limit(gateway: Gateway) -> None:
    drafts: tuple[tuple[Any, int | None], ...] = (
        (None, None),
        ({"method": "off"}, 0),
        ({"num_speculative_tokens": 3}, 3),
        ({}, None),
    )
    for path, (asked, most) in product(ROUTES, drafts):
        await gateway.post(path, **ASKED[path], speculative=asked)
        told = gateway.prefill.sampling
        assert (told.most_drafted if told.HasField("most_drafted") else None) == most
    for path in ROUTES:
        many = {"method": "ngram", "num_speculative_tokens": 65}
        error = await gateway.refused(path, **ASKED[path], speculative=many)
        assert error["message"] == "speculative.num_speculative_tokens: must be from 1 to 64, not 65"
        error = await gateway.refused(path, **ASKED[path], speculative={"method": "x"})
        assert error["param"] == "speculative.method"


async def test_template_that_reads_an_option_gets_it(gateway: Gateway) -> None:
    await gateway.thinks("ok", template="{{ messages[0].content }}{{ reasoning_effort }}{{ style }}")
    await gateway.post(CHAT, **ASKED[CHAT], reasoning_effort="low", chat_template_kwargs={"style": "x"})
    assert gateway.prompt() == "hilowx"
    await gateway.post(RESPONSE, **ASKED[RESPONSE], reasoning={"effort": "high"})
    assert gateway.prompt() == "hihigh"


async def test_workers_get_the_objectives_of_a_body(gateway: Gateway) -> None:
    for path in ROUTES:
        await gateway.post(path, **ASKED[path], ttft_slo_ms=3_600_000, tbt_slo_ms=12.0)
        asked = gateway.prefill
        assert 3_000_000 < asked.first_token_in_ms <= 3_600_000 and asked.tbt_slo_ms == 12


SESSIONS: list[tuple[dict[str, Any], tuple[str, float | None, bool]]] = [
    ({}, ("header", None, False)),
    ({"session_id": "body", "keep_for_s": 7.5, "done": True}, ("body", 7.5, True)),
    ({"prompt_cache_key": "key", "prompt_cache_retention": "in_memory"}, ("key", 600.0, False)),
    ({"prompt_cache_key": "key", "prompt_cache_retention": "in-memory"}, ("key", 600.0, False)),
    ({"prompt_cache_retention": "24h"}, ("header", 86_400.0, False)),
    ({"session_id": "body", "prompt_cache_key": "key", "keep_for_s": 1.0, "prompt_cache_retention": "24h"},
     ("body", 1.0, False)),
]  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), SESSIONS)
def test_session_is_set_by_own_fields_openais_or_the_header(
    given: dict[str, Any], expected: tuple[str, float | None, bool]
) -> None:
    message = CompletionRequest(prompt="a", **given)
    (request,) = completion_requests(message, HttpCall("", Caller(), "header", None))
    assert (request.session_id, request.keep_for_s, request.done) == expected
    assert request.session == "header"  # where it is placed


def test_longest_of_anthropics_marks_says_how_long_a_session_is_kept() -> None:
    parts = [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "5m"}},
        {"type": "text", "text": "b", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"type": "text", "text": "c", "cache_control": {"type": "ephemeral"}},
    ]
    chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": parts}], "session_id": "s"})
    assert (kept_for_s(chat, True), kept_for_s(chat, False)) == (3600.0, None)
    parts = [{**each, "type": "input_text"} for each in parts]
    response = ResponseRequest.model_validate({"input": [{"role": "user", "content": parts}]})
    assert kept_for_s(response, True) == 3600.0


async def test_empty_session_field_has_no_effect(gateway: Gateway) -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    message = [{"role": "user", "content": [part]}]
    await gateway.post(CHAT, **(ASKED[CHAT] | {"messages": message}), prompt_cache_retention="24h")


async def test_unknown_retention_is_rejected_with_the_known_ones(gateway: Gateway) -> None:
    error = await gateway.refused(CHAT, **ASKED[CHAT], prompt_cache_key="k", prompt_cache_retention="7d")
    assert error["param"] == "prompt_cache_retention"
    assert all(known in error["message"] for known in ("in_memory", "in-memory", "24h"))
    for control, param in (({"type": "ephemeral", "ttl": "1d"}, "ttl"), ({"type": "forever"}, "type")):
        part = {"type": "text", "text": "hi", "cache_control": control}
        message = [{"role": "user", "content": [part]}]
        error = await gateway.refused(CHAT, **(ASKED[CHAT] | {"messages": message}))
        assert error["param"] == f"messages[0].content[0].cache_control.{param}"


CLIENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm bench serve": (
        TEXT,
        {"model": "tiny", "prompt": "a", "repetition_penalty": 1.0, "max_tokens": 4, "logprobs": None, "stream": True,
         "stream_options": {"include_usage": True}, "ignore_eos": True},
    ),
    "vllm bench serve, chat": (
        CHAT,
        {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "stream": True,
         "max_completion_tokens": 4, "stream_options": {"include_usage": True}, "ignore_eos": True},
    ),
    "guidellm": (
        TEXT,
        {"model": "tiny", "prompt": "a", "stream": True, "max_tokens": 4, "stop": None, "ignore_eos": True,
         "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "guidellm, chat": (
        CHAT,
        {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "stream": True,
         "max_completion_tokens": 4, "max_tokens": 4, "stop": None, "ignore_eos": True,
         "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "aiperf": (
        CHAT,
        {"model": "tiny", "messages": HI, "stream": True, "max_completion_tokens": 4, "min_tokens": 4,
         "ignore_eos": True, "stream_options": {"include_usage": True}},
    ),
    "lm-eval": (
        CHAT,
        {"model": "tiny", "messages": HI, "max_tokens": 4, "temperature": 0, "stop": ["\n\n"], "seed": 1234},
    ),
    "LangChain": (
        CHAT,
        {"model": "tiny", "stream": False, "temperature": 0.7, "n": 1, "parallel_tool_calls": True, "tools": [
            {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}, "strict": True}}],
         "messages": [{"content": "hi", "role": "user"}, {"content": None, "role": "assistant", "tool_calls": [
             {"type": "function", "id": "c", "function": {"name": "f", "arguments": "{}"}}]},
             {"content": "sunny", "role": "tool", "tool_call_id": "c"}], "max_tokens": 4},
    ),
    "Open WebUI": (
        CHAT,
        {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 4, "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}]},
    ),
    "an answer of OpenAI's client, repeated": (
        CHAT,
        {"max_tokens": 4, "messages": [*HI, {"role": "assistant", "content": "x", "refusal": None, "annotations": [],
         "audio": None, "function_call": None, "parsed": {"a": 1}, "tool_calls": [{"id": "c", "type": "function",
         "index": 0, "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}}}]}]},
    ),
    "a response of OpenAI's client, repeated": (
        RESPONSE,
        {"max_output_tokens": 4, "store": False, "include": [], "tools": [], "truncation": "disabled", "input": [
            {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [
                {"type": "output_text", "text": "x", "annotations": [], "logprobs": []}]},
            {"role": "user", "content": "hi"}]},
    ),
    "ollama run, before the first question": (
        "/api/show",
        {"model": "tiny", "system": "", "template": "", "verbose": False, "options": None, "name": ""},
    ),
    "ollama run": (
        "/api/chat",
        {"model": "tiny:latest", "messages": HI, "format": "", "options": {"num_predict": 4}, "keep_alive": "5m0s"},
    ),
    "Open WebUI, by Ollama's API": (
        "/api/chat",
        {"model": "tiny", "stream": True, "keep_alive": -1, "options": {"num_ctx": 2048, "temperature": 0.7,
         "num_predict": 4}, "messages": [{"role": "user", "content": "a", "images": []}]},
    ),
    "LangChain, by Ollama's API": (
        "/api/chat",
        {"model": "tiny", "stream": True, "options": {"temperature": 0.7, "num_predict": 4, "stop": []}, "format": None,
         "keep_alive": None, "tools": [{"type": "function", "function": {"name": "f", "description": "d",
         "parameters": {"type": "object", "properties": {}}}}], "messages": [*HI, {"role": "assistant", "content": "",
         "tool_calls": [{"type": "function", "id": "c", "function": {"name": "f", "arguments": {}}}]},
         {"role": "tool", "content": "sunny", "tool_call_id": "c"}]},
    ),
    "vLLM's own defaults, all written out": (
        CHAT,
        {**ASKED[CHAT], "skip_special_tokens": True, "spaces_between_special_tokens": True, "echo": False,
         "include_stop_str_in_output": False, "use_beam_search": False, "length_penalty": 1.0, "documents": None,
         "add_special_tokens": False, "continue_final_message": False, "include_reasoning": True, "min_tokens": 0,
         "truncate_prompt_tokens": None, "return_tokens_as_token_ids": False, "priority": 0, "bad_words": []},
    ),
}  # fmt: skip


async def test_bodies_of_unmodified_clients_are_answered(gateway: Gateway) -> None:
    for name, (path, body) in CLIENTS.items():
        response = await gateway.client.post(path, json=body)

        assert response.status_code == 200, (name, response.text)


async def test_query_parameter_is_refused_by_name(gateway: Gateway) -> None:
    for path in ("/v1/models", "/v1/models/tiny", "/metrics", "/health", "/openapi.json", "/page/state", *ASKED):
        body = ASKED.get(path)
        response = await gateway.client.request("POST" if body else "GET", f"{path}?stream=true&x=", json=body)

        assert response.status_code == 400, path
        assert message_of(response.json()["error"]).startswith("stream: unknown query parameter"), path
    assert (await gateway.client.get("/?utm=x")).status_code == 200, "links to the page may carry anything"


async def test_fields_of_the_other_kind_of_tokenizing_are_refused(gateway: Gateway) -> None:
    others: tuple[dict[str, Any], ...] = ({"add_generation_prompt": True}, {"chat_template_kwargs": {}}, {"tools": []})
    for fields in others:
        assert (await gateway.refused("/tokenize", prompt="a", **fields))["param"] == next(iter(fields))
    assert (await gateway.refused("/tokenize", messages=HI, add_special_tokens=True))["param"] == "add_special_tokens"
    await gateway.post("/tokenize", messages=HI, add_special_tokens=False)


async def test_api_document_forbids_other_fields(gateway: Gateway) -> None:
    schemas = (await gateway.client.get("/openapi.json")).json()["components"]["schemas"]

    assert {name for name, schema in schemas.items() if schema.get("additionalProperties") is not False} == ERRORS
    assert schemas["ChatRequest"]["properties"]["audio"]["enum"] == [None]


async def test_developer_is_system_for_a_template_that_knows_only_that(gateway: Gateway) -> None:
    await gateway.thinks("ok", template=QWEN)
    turns = [{"role": "developer", "content": "be brief"}, *HI]
    for path, field in ((CHAT, "messages"), (RESPONSE, "input")):
        await gateway.post(path, **{field: turns})
        assert gateway.prompt() == "[system]be brief[user]hi"


async def test_forced_tool_with_an_unknown_format_is_served(gateway: Gateway) -> None:
    function = {"name": "f", "parameters": {"properties": {"a": {"type": "string", "format": "password"}}}}
    tools = [{"type": "function", "function": function}]
    await gateway.post(CHAT, messages=HI, tools=tools, tool_choice="required")
