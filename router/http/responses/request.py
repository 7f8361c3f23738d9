"""Conversion of requests of the Responses API into chat requests. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from baton.router.http.chat_body import named_tool, schema_format
from baton.router.http.edge.problem import refused
from baton.router.http.messages import ChatRequest, JsonObjectFormat, NamedSchemaFormat, OpenAIFields
from baton.router.http.requests import HttpCall, kept_for_s, session_id, structure_of
from baton.router.http.responses.bodies import AllowedTools, FlatNamedTool, ResponseRequest
from baton.router.http.responses.items import Item, chat_messages
from baton.router.http.responses.tools import mapped_tools


def chat_of(message: ResponseRequest, items: Sequence[Item], call: HttpCall) -> ChatRequest:
    """Convert a request into a chat request. `items`: the conversation, including the new input. Raises: Problem."""
    call.reader.not_acted_upon += _left_out(message)
    structure_of(message)  # called to reject conflicting fields by their names in this body
    system = [{"role": "system", "content": message.instructions}] if message.instructions else []
    effort = message.reasoning.effort if message.reasoning is not None else None
    chat = {
        "messages": [*system, *chat_messages(items)],
        "max_tokens": message.max_output_tokens,
        "stream": message.stream,
        "response_format": _format(message),
        "reasoning_effort": effort,
        "thinking_budget": message.thinking_budget,
        "tools": _tools(message),
        "tool_choice": _choice(message),
        "parallel_tool_calls": message.parallel_tool_calls,
    }
    # Not validated again: the helper parses long lists to arrays, which validation would reject.
    shared: dict[str, Any] = {name: getattr(message, name) for name in OpenAIFields.model_fields}
    shared["keep_for_s"] = kept_for_s(message, bool(session_id(message, call)))
    return ChatRequest.model_validate(chat).model_copy(update=shared)


def _format(message: ResponseRequest) -> Mapping[str, Any] | None:
    form = message.text.format if message.text is not None else None
    match form:
        case JsonObjectFormat():
            return {"type": "json_object"}
        case NamedSchemaFormat():
            return schema_format(form.schema_, form.name)
    return None


def _left_out(message: ResponseRequest) -> Iterator[str]:
    """Yield the provider's own tools and types of items that are left out of the prompt."""
    for place, tool in enumerate(message.tools or ()):
        if isinstance(tool, dict):
            yield f"tools[{place}] ({tool['type']})"
    for item in () if isinstance(message.input, str) else message.input:
        if isinstance(item, dict):
            yield f"input ({item['type']})"


def _tools(message: ResponseRequest) -> list[Mapping[str, Any]] | None:
    """Return the tools that the model may call: all, or only those that the tool choice allows. Raises: Problem."""
    if message.tools is None:
        return None
    tools = mapped_tools(message)
    names = {tool.function_name for tool in tools}
    allowed = _allowed(message.tool_choice)
    for place, name in enumerate(allowed or ()):
        if name not in names:
            field = "name" if isinstance(message.tool_choice, FlatNamedTool) else f"tools[{place}].name"
            raise refused(f"tool_choice.{field}", f"unknown tool {name!r}; declare it in tools")
    is_subset = isinstance(message.tool_choice, AllowedTools)
    return [tool.function for tool in tools if not is_subset or tool.function_name in (allowed or ())]


def _allowed(choice: object) -> list[str] | None:
    match choice:
        case FlatNamedTool():
            return [choice.name]
        case AllowedTools():
            return [tool.name for tool in choice.tools]
    return None


def _choice(message: ResponseRequest) -> str | Mapping[str, Any] | None:
    match message.tool_choice:
        case FlatNamedTool(name=name):
            return named_tool(name)
        case AllowedTools(mode=mode):
            return mode
        case choice:
            return choice
