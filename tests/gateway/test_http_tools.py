"""Function calls, from what the model says to what the client gets."""

import json
from typing import Any

import pytest

from baton.gateway.output.tool_calls import (
    CallBegins,
    CallGoesOn,
    HermesParser,
    JsonParser,
    NamedParser,
    Piece,
    ToolParser,
)
from tests.gateway.conftest import Gateway

PATH = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
ASKED = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro}\\"me"}}\n</tool_call>'
NAMES = frozenset({"weather", "time"})


def read(parser: ToolParser, text: str, step: int) -> tuple[str, list[tuple[str, str]]]:
    """(content, calls with their arguments), however the text is cut up."""
    pieces: list[Piece] = []
    for begin in range(0, len(text), step):
        pieces += parser.push(text[begin : begin + step])
    pieces += parser.finish()
    content, calls = "", list[list[str]]()
    for piece in pieces:
        match piece:
            case CallBegins(index, call_id, name):
                assert index == len(calls) and call_id
                calls.append([name, ""])
            case CallGoesOn(index, arguments):
                calls[index][1] += arguments
            case str():
                content += piece
    return content, [(name, arguments) for name, arguments in calls]


HERMES = {
    "just text < tool_call": ("just text < tool_call", []),
    CALL: ("", [("weather", '{"city": "Ro}\\"me"}')]),
    f"I look.\n{CALL}\n": ("I look.", [("weather", '{"city": "Ro}\\"me"}')]),
    f"{CALL}\n{CALL.replace('weather', 'time')}": (
        "", [("weather", '{"city": "Ro}\\"me"}'), ("time", '{"city": "Ro}\\"me"}')],
    ),
    f"{CALL}\nSo.": ("So.", [("weather", '{"city": "Ro}\\"me"}')]),
    '<tool_call>{"arguments": {"a": [1, {}]}, "name": "time"}</tool_call>': ("", [("time", '{"a": [1, {}]}')]),
    '<tool_call>{"name": "time"}</tool_call>': ("", [("time", "{}")]),
    '<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}</tool_call>': ("", [("time", '{"a": 1}')]),
    "<tool_call>nonsense</tool_call>": ("<tool_call>nonsense</tool_call>", []),
    '<tool_call>{"name": "weather", "arguments": {"ci': ("", [("weather", '{"ci')]),
    '<tool_call>{"name": "wea': ('<tool_call>{"name": "wea', []),
    "half a <tool_ca": ("half a <tool_ca", []),
}  # fmt: skip
JSON = {
    "text": ("text", []),
    '{"name": "weather", "parameters": {"city": "Rome"}}': ("", [("weather", '{"city": "Rome"}')]),
    '<|python_tag|>{"name": "time", "parameters": {}}': ("", [("time", "{}")]),
    '{"name": "weather", "parameters": {"a": 1}}; {"name": "time", "parameters": {"b": 2}}': (
        "", [("weather", '{"a": 1}'), ("time", '{"b": 2}')],
    ),
    '[{"name":"time","parameters":{"b":2}},{"name":"weather","parameters":{}}]': (
        "", [("time", '{"b":2}'), ("weather", "{}")],
    ),
    '{"name": "Bob", "parameters": {}}': ('{"name": "Bob", "parameters": {}}', []),
    '{"age": 5}': ('{"age": 5}', []),
    "[1, 2]": ("[1, 2]", []),
}  # fmt: skip


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("text", HERMES)
def test_hermes_calls_are_read_however_they_are_cut(text: str, step: int) -> None:
    assert read(HermesParser(), text, step) == HERMES[text]


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("text", JSON)
def test_json_calls_are_read_however_they_are_cut(text: str, step: int) -> None:
    assert read(JsonParser(NAMES), text, step) == JSON[text]


def test_all_of_a_forced_call_is_its_arguments() -> None:
    assert read(NamedParser("time"), '{"a": 1}', 3) == ("", [("time", '{"a": 1}')])


def test_arguments_go_out_while_they_are_written() -> None:
    parser = HermesParser()
    parser.push('<tool_call>{"name": "weather", "arguments": {"city": ')

    assert parser.push('"Ro') == [CallGoesOn(0, '"Ro')]


async def test_a_call_in_a_whole_answer(gateway: Gateway) -> None:
    gateway.says(f"I look.{CALL}")

    (choice,) = (await gateway.post(PATH, **ASKED, max_tokens=200))["choices"]

    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I look."
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": 'Ro}"me'}
    assert '"name": "weather"' in gateway.prompt()


async def test_a_call_in_a_stream(gateway: Gateway) -> None:
    gateway.says(CALL, "no call")

    chunks = await gateway.stream(PATH, **ASKED, max_tokens=200, n=2)

    deltas: dict[int, list[Any]] = {0: [], 1: []}
    reasons = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            deltas[choice["index"]].append(choice["delta"])
            reasons[choice["index"]] = choice["finish_reason"]
    calls = [call for delta in deltas[0] for call in delta.get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "weather" and len(calls) > 3
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"city": 'Ro}"me'}
    assert "".join(delta.get("content", "") for delta in deltas[1]) == "no call"
    assert reasons == {0: "tool_calls", 1: "stop"}


async def test_where_calls_must_not_be_parallel_there_is_one(gateway: Gateway) -> None:
    gateway.says(CALL * 2)
    for parallel, calls in ((True, 2), (False, 1)):
        asked = {**ASKED, "parallel_tool_calls": parallel, "max_tokens": 300}

        message = (await gateway.post(PATH, **asked))["choices"][0]["message"]
        chunks = await gateway.stream(PATH, **asked)

        assert len(message["tool_calls"]) == calls
        told = [call["index"] for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
        assert set(told) == set(range(calls))


async def test_without_a_choice_of_tools_a_call_is_text_and_tools_are_not_shown(gateway: Gateway) -> None:
    gateway.says(CALL)

    (choice,) = (await gateway.post(PATH, **ASKED, tool_choice="none", max_tokens=200))["choices"]

    assert choice["message"]["content"] == CALL and "tool_calls" not in choice["message"]
    assert "[tools]" not in gateway.prompt()


async def test_answers_of_tools_reach_the_template(gateway: Gateway) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]

    await gateway.post(PATH, messages=messages, tools=TOOLS, max_tokens=2)

    assert gateway.prompt().endswith(
        '[user]hi[assistant]<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
        "[tool]sunny[assistant]"
    )


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": {"type": "function", "function": {"name": "another"}}}, "tool_choice.function.name"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "picture"}]}, "tools[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
]


async def test_what_is_wrong_in_a_chat_is_named(gateway: Gateway) -> None:
    for fields, param in WRONG:
        assert (await gateway.refused(PATH, **(ASKED | fields)))["param"] == param, fields
