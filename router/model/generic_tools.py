"""Tools in the prompt of a model whose chat template shows none: a generic format, in text that all templates show.

The functions are described in the system prompt, calls are JSON between tags, as in Hermes' format, and results are
messages of the user. Pure.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from baton.router.types.request import ChatPrompt, Message, ToolCall
from baton.text.output.formats import hermes
from baton.text.structured.json_text import read_arguments

GENERIC = "generic"
"""Name of this format in the status of a router."""
NAME = "hermes"
"""Format of the calls, by its name in FORMATS."""
_SYSTEM_ROLES = ("system", "developer")
_BETWEEN = "\n\n"
_TEXT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{functions}
</tools>

For each function call, return a json object with function name and arguments within {begin}{end} XML tags:
{begin}
{{"name": <function-name>, "arguments": <args-json-object>}}
{end}"""


def with_described_tools(prompt: ChatPrompt) -> ChatPrompt:
    """Return the prompt with its tools, their calls and their results as text."""
    messages = texts_of_calls(prompt.messages)
    described = _described(prompt.tools)
    if messages and messages[0].role in _SYSTEM_ROLES:
        messages[0] = replace(messages[0], content=f"{messages[0].content}{_BETWEEN}{described}")
    else:
        messages.insert(0, Message("system", described))
    return replace(prompt, messages=messages, tools=())


def texts_of_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with calls and results as text."""
    return list(_texts(messages))


def _described(tools: Sequence[Mapping[str, Any]]) -> str:
    functions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return _TEXT.format(functions=functions, begin=hermes.OPEN, end=hermes.CLOSE)


def _texts(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages without calls and results. Adjacent results become one message."""
    results: list[str] = []
    for message in messages:
        if message.role == "tool":
            results.append(f"<tool_response>\n{message.content}\n</tool_response>")
            continue
        if results:
            yield Message("user", "\n".join(results))
            results = []
        parts = [message.content, *map(_call, message.tool_calls)]
        yield replace(message, content="\n".join(part for part in parts if part), tool_calls=())
    if results:
        yield Message("user", "\n".join(results))


def _call(call: ToolCall) -> str:
    arguments = read_arguments(call.arguments.strip() or "{}")
    called = {"name": call.name, "arguments": call.arguments if arguments is None else arguments}
    return f"{hermes.OPEN}\n{json.dumps(called, ensure_ascii=False)}\n{hermes.CLOSE}"
