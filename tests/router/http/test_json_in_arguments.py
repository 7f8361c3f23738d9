"""Arguments that a model wrote badly, in an answer and in the turns that follow it: no dialect fails on them."""

import json
from typing import Any

import pytest

from baton.client import AsyncBatonClient, InvalidRequest, Message, Tool, ToolCall
from tests.router.http.conftest import WAIT_S, Gateway

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
USER = {"role": "user", "content": "hi"}
ARGUMENTS = (
    r'{"city": "\ud83d"}',
    '{"city": ' + "[" * 139 + "]" * 139 + "}",
    '{"city": "Rome", "city": "Oslo"}',
    '{"city": 1e999}',
    '{"city": ' + "9" * 300 + "}",
    "63",
)
DEEP = '{"city": ' + "[" * 2000 + "]" * 2000 + "}"


def call_of(arguments: str) -> str:
    return f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'


async def test_chat_with_badly_written_arguments_continues(gateway: Gateway) -> None:
    for arguments in ARGUMENTS:
        gateway.says(call_of(arguments))
        (choice,) = (await gateway.post("/v1/chat/completions", messages=[USER], tools=TOOLS))["choices"]
        (call,) = choice["message"]["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
        await gateway.post("/v1/chat/completions", messages=[USER, choice["message"], result], tools=TOOLS)

        assert call["function"]["arguments"] == arguments
        assert "sunny" in gateway.prompt()


async def test_response_with_badly_written_arguments_can_be_continued(gateway: Gateway) -> None:
    tools = [{"type": "function", **FUNCTION}]
    for arguments in ARGUMENTS:
        gateway.says(call_of(arguments))
        first = await gateway.post("/v1/responses", input="hi", tools=tools)
        (call,) = first["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        await gateway.post("/v1/responses", input=[result], previous_response_id=first["id"], tools=tools)

        assert "sunny" in gateway.prompt()


async def test_anthropic_and_ollama_show_badly_written_arguments_as_an_object(gateway: Gateway) -> None:
    anthropic: dict[str, Any] = {"tools": [{"name": "weather", "input_schema": PARAMETERS}], "max_tokens": 450}
    ollama: dict[str, Any] = {"tools": TOOLS, "stream": False, "options": {"num_predict": -1}}
    for arguments in ARGUMENTS:
        gateway.says(call_of(arguments))
        content = (await gateway.post("/v1/messages", messages=[USER], **anthropic))["content"]
        result = {"type": "tool_result", "tool_use_id": content[0]["id"], "content": "sunny"}
        turns = [USER, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
        await gateway.post("/v1/messages", messages=turns, **anthropic)
        message = (await gateway.post("/api/chat", messages=[USER], **ollama))["message"]
        await gateway.post("/api/chat", messages=[USER, message, {"role": "tool", "content": "cloudy"}], **ollama)

        assert isinstance(content[0]["input"], dict)
        assert isinstance(message["tool_calls"][0]["function"]["arguments"], dict)
        assert "cloudy" in gateway.prompt()


async def test_grpc_counts_the_tokens_of_arguments_that_are_2000_deep(gateway: Gateway) -> None:
    messages = [Message("user", "hi"), Message("assistant", "", tool_calls=(ToolCall("1", "weather", DEEP),))]

    async with AsyncBatonClient(f"127.0.0.1:{gateway.process.running.ports[0]}", timeout_s=WAIT_S) as client:
        with pytest.raises(InvalidRequest, match="tokens"):  # the text is the model's to read, and too long for it
            await client.complete_chat(messages, tools=[Tool("weather")])


async def test_json_text_of_a_schema_is_refused_by_its_field(gateway: Gateway) -> None:
    for text, reason in ((DEEP, "levels deep"), (r'{"const": "\ud83d"}', "surrogate"), ("{", "is not JSON")):
        error = await gateway.refused("/v1/chat/completions", messages=[USER], guided_json=text)

        assert error["param"] == "guided_json" and reason in error["message"], error


async def test_deep_or_long_anthropic_call_in_history_is_no_server_error(gateway: Gateway) -> None:
    for given in (json.loads("[" * 150 + "]" * 150), 10**4000, {"a": [True, None, 1.5]}):
        use = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": given}}
        result = {"type": "tool_result", "tool_use_id": "1", "content": "sunny"}
        messages = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]

        response = await gateway.client.post("/v1/messages", json={"messages": messages, "max_tokens": 2})

        assert response.status_code in (200, 400), response.text
