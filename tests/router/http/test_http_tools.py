"""Function calls, from what the model says to what the client gets."""

import json
from typing import Any

from baton.text.output.formats.hermes import HermesReader
from baton.text.output.pieces import CallArguments
from baton.text.output.tool_calls import NamedParser
from tests.router.http.conftest import Gateway
from tests.text.output.golden_streams import fed

PATH = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
ASKED = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro}\\"me"}}\n</tool_call>'


def test_all_of_a_forced_call_is_its_arguments() -> None:
    assert fed(NamedParser("time"), ['{"a', '": 1}']) == (("time", '{"a": 1}'),)


def test_arguments_are_streamed_as_they_are_written() -> None:
    parser = HermesReader({})
    parser.push('<tool_call>{"name": "weather", "arguments": {"city": ')

    assert parser.push('"Ro') == [CallArguments(0, '"Ro')]


async def test_call_in_a_whole_answer(gateway: Gateway) -> None:
    gateway.says(f"I look.{CALL}")

    (choice,) = (await gateway.post(PATH, **ASKED, max_tokens=200))["choices"]

    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I look."
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": 'Ro}"me'}
    assert '"name": "weather"' in gateway.prompt()


async def test_call_in_a_stream(gateway: Gateway) -> None:
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


async def test_nonparallel_calls_are_limited_to_one(gateway: Gateway) -> None:
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
