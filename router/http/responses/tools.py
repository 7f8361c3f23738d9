"""Tools of the Responses API as functions, and their calls as items. Pure.

A tool with free text as input is a function with the argument `input`. The client's shell is a function with a command,
and a tool of a namespace is the function NAMESPACE__NAME.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.router.http.chat_body import ChatPart, function_tool
from baton.router.http.responses.bodies import (
    FlatNamedTool,
    FlatTool,
    FreeTool,
    Namespace,
    ResponseRequest,
    ShellTool,
    ToolGrammar,
)
from baton.text.output.tool_calls import arguments_object
from baton.text.structured.output import StructuredKind, StructuredOutput

FUNCTION, FREE, SHELL = "function_call", "custom_tool_call", "local_shell_call"
"""Types of items that are calls."""
CALLS = (FUNCTION, FREE, SHELL)
SHELL_NAME = "local_shell"
_INPUT = "input"
_BETWEEN = "__"  # between a namespace and a name
_FREE_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {_INPUT: {"type": "string"}},
    "required": [_INPUT],
    "additionalProperties": False,
}
_SHELL_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class MappedTool:
    """Function that the model gets for a tool. `kind`: type of the items of its calls. `field`: path in the body."""

    kind: str
    name: str
    namespace: str | None
    field: str
    function: ChatPart
    grammar: StructuredOutput | None = None

    @property
    def function_name(self) -> str:
        return function_name(self.name, self.namespace)

    def begun(self, call_id: str) -> dict[str, Any]:
        """Return the fields of a call's item before its arguments are known."""
        if self.kind == SHELL:
            return {"call_id": call_id, "action": {"type": "exec", "command": [], "env": {}}}
        named = {"call_id": call_id, "name": self.name, "arguments" if self.kind == FUNCTION else _INPUT: ""}
        return named if self.namespace is None else {**named, "namespace": self.namespace}


def function_name(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}{_BETWEEN}{name}"


def mapped_tools(message: ResponseRequest) -> list[MappedTool]:
    """Return the functions for a request's tools. The provider's own tools have none."""
    return list(_mapped(message.tools or ()))


def _mapped(tools: Sequence[object], field: str = "tools", namespace: str | None = None) -> Iterator[MappedTool]:
    for place, tool in enumerate(tools):
        path = f"{field}[{place}]"
        match tool:
            case FlatTool():
                name = function_name(tool.name, namespace)
                made = function_tool(name, tool.description, tool.parameters, tool.strict)
                yield MappedTool(FUNCTION, tool.name, namespace, path, made)
            case FreeTool():
                name = function_name(tool.name, namespace)
                made = function_tool(name, _described(tool), _FREE_SCHEMA, None)
                yield MappedTool(FREE, tool.name, namespace, path, made, _grammar(tool))
            case ShellTool():
                made = function_tool(SHELL_NAME, "Run a command on the user's machine.", _SHELL_SCHEMA, None)
                yield MappedTool(SHELL, SHELL_NAME, namespace, path, made)
            case Namespace():
                yield from _mapped(tool.tools, f"{path}.tools", tool.name)


def _described(tool: FreeTool) -> str | None:
    """Return the description of a tool with free text, with the grammar of its input."""
    if not isinstance(tool.format, ToolGrammar):
        return tool.description
    grammar = f"`{_INPUT}` must follow this grammar ({tool.format.syntax}):\n{tool.format.definition}"
    return grammar if not tool.description else f"{tool.description}\n\n{grammar}"


_KINDS = {"lark": StructuredKind.GRAMMAR, "regex": StructuredKind.REGEX}


def _grammar(tool: FreeTool) -> StructuredOutput | None:
    form = tool.format
    return StructuredOutput(_KINDS[form.syntax], form.definition) if isinstance(form, ToolGrammar) else None


def tool_grammars(message: ResponseRequest) -> dict[str, StructuredOutput]:
    """Return the grammars of a request's tools with free text, by name of the function."""
    return {tool.function_name: tool.grammar for tool in mapped_tools(message) if tool.grammar is not None}


def is_forced(message: ResponseRequest) -> bool:
    """Return whether the model must call a tool. The text of a tool with a grammar is then the answer itself."""
    choice = message.tool_choice
    return choice == "required" or isinstance(choice, FlatNamedTool) or getattr(choice, "mode", "auto") == "required"


def free_input(arguments: str) -> str:
    """Return the text of a call of a tool with free text. A model may write the text itself instead of JSON."""
    given = arguments_object(arguments).get(_INPUT)
    return given if isinstance(given, str) else arguments


def shell_action(arguments: str) -> dict[str, Any]:
    """Return the action of a call of the client's shell. A command in one text runs in a shell."""
    given = arguments_object(arguments)
    command = given.get("command", given.get("_raw", ""))
    words = [str(word) for word in command] if isinstance(command, list) else ["bash", "-lc", str(command)]
    options = {name: given[name] for name in ("working_directory", "timeout_ms") if given.get(name) is not None}
    return {"type": "exec", "command": words, "env": {}, **options}


def function_call(item: Mapping[str, Any]) -> ChatPart:
    """Return name and arguments of the function call for an item of an earlier call."""
    match item["type"]:
        case "custom_tool_call":
            name, arguments = item["name"], json.dumps({_INPUT: item[_INPUT]}, ensure_ascii=False)
        case "local_shell_call":
            kept = {key: value for key, value in item["action"].items() if key in _SHELL_SCHEMA["properties"]}
            return {"name": SHELL_NAME, "arguments": json.dumps(kept, ensure_ascii=False)}
        case _:
            name, arguments = item["name"], item["arguments"]
    return {"name": function_name(name, item.get("namespace")), "arguments": arguments}
