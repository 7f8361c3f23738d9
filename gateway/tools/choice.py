"""The effect of `tools` and `tool_choice`: tools in the template, forced calls, how the answer is read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.gateway.http.problem import refused
from baton.gateway.messages.chat import ChatRequest, NamedTool, Tool
from baton.gateway.structure import json_schema
from baton.gateway.tools.calls import OPEN, PYTHON_TAG, FirstCall, HermesParser, JsonParser, NamedParser, ToolParser
from baton.generation.structured.output import StructuredOutput
from baton.router.model.chat_template import ChatTemplate

_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`shown` are the tools that the template gets; `parser` makes a reader for each choice, None: all is text."""

    shown: Sequence[Mapping[str, Any]] = ()
    forced: StructuredOutput | None = None
    parser: Callable[[], ToolParser] | None = None


def tool_use(request: ChatRequest, template: ChatTemplate | None) -> ToolUse:
    """`template` is the model's own. Raises: Problem."""
    tools, choice = request.tools or [], request.tool_choice
    if not tools:
        if isinstance(choice, NamedTool) or choice == "required":
            raise refused("tool_choice", "there are no tools to choose from")
        return ToolUse()
    if choice == "none":
        return ToolUse()
    shown = [tool.model_dump(exclude_none=True) for tool in tools]
    if isinstance(choice, NamedTool):
        tool = _named(tools, choice.function.name)
        schema = dict(tool.function.parameters or _ANY_ARGUMENTS)
        return ToolUse(shown, json_schema(schema), lambda: NamedParser(tool.function.name))
    names = frozenset(tool.function.name for tool in tools)
    one = request.parallel_tool_calls is False
    if choice == "required":
        return ToolUse(shown, json_schema(_calls_schema(tools, 1 if one else None)), lambda: JsonParser(names))
    check_shown(template)
    parser = _parser(template.source if template is not None else "", names)
    return ToolUse(shown, None, (lambda: FirstCall(parser())) if one and parser is not None else parser)


def check_shown(template: ChatTemplate | None) -> None:
    """Raises: Problem where the model would not see the tools that a request has."""
    if template is not None and "tools" not in template.variables:
        raise refused("tools", "this model's chat template does not show them; tool_choice can still force a call")


def _parser(template: str, names: frozenset[str]) -> Callable[[], ToolParser] | None:
    """By the format that the template teaches the model."""
    if OPEN in template:
        return HermesParser
    if PYTHON_TAG in template or '"parameters"' in template:
        return lambda: JsonParser(names)
    return None


def _named(tools: Sequence[Tool], name: str) -> Tool:
    for tool in tools:
        if tool.function.name == name:
            return tool
    raise refused("tool_choice.function.name", f"there is no tool {name!r}")


def _calls_schema(tools: Sequence[Tool], most: int | None) -> dict[str, Any]:
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "parameters": tool.function.parameters or _ANY_ARGUMENTS,
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    bounds = {"minItems": 1} | ({"maxItems": most} if most is not None else {})
    return {"type": "array", "items": {"anyOf": calls}, **bounds}
