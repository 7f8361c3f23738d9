"""Errors name a field that the client sent, in its own dialect, in our words."""

import re
from typing import Any

import pytest

from baton.router.model.chat_template import ChatTemplate
from tests.router.http.conftest import Gateway
from tests.router.test_template_traces import BARE, QWEN

CHAT, TEXT, RESPONSE, ANTHROPIC, OLLAMA = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
)
SAID = {"role": "user", "content": "hi"}
MUST = {"required": ["a"]}
LIBRARY = re.compile(
    r"Input should|Field required|validation|discriminator|lark|%json|json-schema:|jinja|undefined|_type\b"
)
"""Words of libraries."""


def forced(parameters: dict[str, Any]) -> dict[str, Any]:
    function = {"name": "f", "parameters": parameters}
    return {"messages": [SAID], "tools": [{"type": "function", "function": function}], "tool_choice": "required"}


WRONG: list[tuple[str, dict[str, Any], str]] = [
    (RESPONSE, {"input": [{"role": "user"}]}, "input[0].content"),
    (RESPONSE, {"input": [{"content": "x"}]}, "input[0].role"),
    (RESPONSE, {"input": [SAID, {"role": "user", "content": [{"type": "input_image"}]}]}, "input[1].content[0].type"),
    (RESPONSE, {"input": [{**SAID, "content": [{"type": "input_text", "text": 5}]}]}, "input[0].content[0].text"),
    (RESPONSE, {"input": [{**SAID, "nme": 1}]}, "input[0].nme"),
    (RESPONSE, {"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    (TEXT, {"prompt": [[1, 2], [99999]]}, "prompt[1][0]"),
    (TEXT, {"prompt": [1, 99999]}, "prompt[1]"),
    (TEXT, {"prompt": ["a", ""]}, "prompt[1]"),
    (TEXT, {"prompt": [[1, 2], ["a"]]}, "prompt[1][0]"),
    (CHAT, {"messages": [SAID], "response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"messages": [SAID], "response_format": {}}, "response_format.type"),
    (CHAT, {"messages": [SAID], "guided_grammar": "start: nothing"}, "guided_grammar"),
    (CHAT, {"messages": [SAID], "guided_regex": "[a"}, "guided_regex"),
    (CHAT, forced({"properties": {"a": {"not": {}}}}), "tools[0].function.parameters"),
    (CHAT, forced({"properties": {"a": {"minLength": 2, "maxLength": 1, "type": "string"}}, **MUST}), "tools"),
    (ANTHROPIC, {"messages": [{**SAID, "content": [{"text": "x"}]}], "max_tokens": 5}, "messages[0].content[0].type"),
    (ANTHROPIC, {"messages": [{"content": "x"}], "max_tokens": 5}, "messages[0].role"),
    (ANTHROPIC, {"messages": [SAID], "max_tokens": 5, "tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    (
        ANTHROPIC,
        {"messages": [SAID], "max_tokens": 5, "tools": [{"name": "a", "input_schema": {"type": "string"}}]},
        "tools[0].input_schema.type",
    ),
    (OLLAMA, {"messages": [SAID], "options": {"temperature": "x"}}, "options.temperature"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "field"), WRONG)
async def test_error_names_the_field_in_our_words(
    gateway: Gateway, path: str, body: dict[str, Any], field: str
) -> None:
    response = await gateway.client.post(path, json=body)

    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert response.status_code == 400 and message.startswith(f"{field}: "), message
    assert LIBRARY.search(message) is None, message


async def test_forced_tool_with_an_unknown_format_is_served(gateway: Gateway) -> None:
    await gateway.post(CHAT, **forced({"properties": {"a": {"type": "string", "format": "password"}}}))


async def use_template(gateway: Gateway, source: str) -> None:
    (await gateway.process.dispatcher.choose("")).served.tokenizer.chat_template = ChatTemplate(source, {})


async def test_developer_is_system_for_a_template_that_knows_only_that(gateway: Gateway) -> None:
    await use_template(gateway, QWEN)

    await gateway.post(CHAT, messages=[{"role": "developer", "content": "be brief"}, SAID])
    assert gateway.prompt() == "[system]be brief[user]hi"
    await gateway.post(RESPONSE, input=[{"role": "developer", "content": "be brief"}, SAID])
    assert gateway.prompt() == "[system]be brief[user]hi"


ANSWER = {"role": "assistant", "content": "x"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
DROPPED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [SAID, {"role": "assistant", "tool_calls": [CALL]}]}, "messages[1].tool_calls"),
    (CHAT, {"messages": [{**SAID, "name": "Ann"}]}, "messages[0].name"),
    (CHAT, {"messages": [SAID, {**ANSWER, "reasoning_content": "hm"}]}, "messages[1].reasoning_content"),
    (OLLAMA, {"messages": [SAID, {**ANSWER, "thinking": "hm"}]}, "messages[1].thinking"),
    (RESPONSE, {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}]}, "input"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "field"), DROPPED)
async def test_what_the_template_drops_is_refused_by_name(
    gateway: Gateway, path: str, body: dict[str, Any], field: str
) -> None:
    await use_template(gateway, BARE)

    response = await gateway.client.post(path, json=body)

    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert response.status_code == 400 and message.startswith(f"{field}: this model's chat template"), message
