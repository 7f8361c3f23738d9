"""Formats of calls, from the checkpoint's template or the router's flag to what the client gets."""

import typing
from typing import Any

import pytest

from baton.router.config import RouterConfig
from baton.router.model.chat_template import ChatTemplate
from baton.text.output.formats.choose import FORMATS, format_of
from tests.router.http.conftest import Gateway

PATH = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300}
TEACHING = {
    "hermes": "within <tool_call></tool_call> XML tags",
    "llama": 'Respond in the format {"name": function name, "parameters": dictionary}',
    "glm": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",
    "qwen_coder": "<tool_call>\n<function=example_function_name>",
    "mistral": "[TOOL_CALLS] [",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "harmony": "<|start|>assistant<|channel|>analysis<|message|>",
    "pythonic": "Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]",
}
"""What the templates of these models have, by format."""


@pytest.mark.parametrize("name", FORMATS)
def test_template_that_teaches_a_format_is_of_it(name: str) -> None:
    assert format_of(ChatTemplate("{% raw %}" + TEACHING[name] + "{% endraw %}{{ tools }}", {})) is FORMATS[name]


def test_template_without_calls_is_of_no_format() -> None:
    assert format_of(ChatTemplate("{{ messages }}", {})) is None


def test_flag_is_stronger_than_the_template_and_knows_all_formats() -> None:
    assert format_of(ChatTemplate("{# <tool_call> #}", {}, "mistral")) is FORMATS["mistral"]
    stated = typing.get_type_hints(RouterConfig)["tool_format"]
    assert set(typing.get_args(stated)) == {"auto", *FORMATS}


@pytest.mark.parametrize("settings", [{"tool_format": "mistral"}], indirect=True)
async def test_router_reads_the_format_that_it_was_told(gateway: Gateway) -> None:
    gateway.says('Look. [TOOL_CALLS]weather[ARGS]{"city": "Rome"}')

    message = (await gateway.post(PATH, **ASKED, tools=TOOLS))["choices"][0]["message"]

    assert message["content"] == "Look."
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"city": "Rome"}']
    assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in message["tool_calls"])


CHANNELS = "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>"


@pytest.mark.parametrize("settings", [{"tool_format": "harmony"}], indirect=True)
async def test_channels_are_thoughts_text_and_calls(gateway: Gateway) -> None:
    gateway.says(f"{CHANNELS}final<|message|>Two.", f"{CHANNELS}commentary to=functions.weather<|message|>{{}}<|call|>")

    answer = await gateway.post(PATH, **ASKED, tools=TOOLS, n=2)
    text, call = answer["choices"]

    assert (text["message"]["reasoning_content"], text["message"]["content"]) == ("Hm.", "Two.")
    assert call["finish_reason"] == "tool_calls" and call["message"]["reasoning_content"] == "Hm."
    assert call["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": "{}"}
    thought_tokens = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 2 * len("Hm.<|start|>assistant") < thought_tokens < 2 * len(CHANNELS) + 60


@pytest.mark.parametrize("settings", [{"tool_format": "harmony"}], indirect=True)
async def test_channels_are_read_without_tools_and_thoughts_may_be_left_out(gateway: Gateway) -> None:
    gateway.says(f"{CHANNELS}final<|message|>Two.")

    message = (await gateway.post(PATH, **ASKED, include_reasoning=False))["choices"][0]["message"]
    chunks = await gateway.stream(PATH, **ASKED)

    assert message["content"] == "Two." and "reasoning_content" not in message
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "Two."
