"""Conversion of a Messages request of Anthropic's API into a chat request. Pure."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from baton.router.http.anthropic.bodies import (
    AnyTool,
    AssistantTurn,
    ClientTool,
    CustomTool,
    DocumentBlock,
    ForcedTool,
    MessagesRequest,
    PromptFields,
    SystemTurn,
    TextBlock,
    ThinkingBlock,
    ToolReference,
    ToolResultBlock,
    ToolUseBlock,
    UserTurn,
)
from baton.router.http.anthropic.client_tools import CLIENT_TOOLS
from baton.router.http.chat_body import ChatPart, function_tool, named_tool, request_fields, schema_format
from baton.router.http.edge.problem import refused
from baton.router.http.messages import ChatRequest
from baton.router.http.requests import HttpCall, kept_for_s, session_id
from baton.router.model.chat_template import ChatTemplate
from baton.router.public.chat import EFFORT, THINKING, thinks

BETWEEN_BLOCKS = "\n"


def chat_of(message: PromptFields, template: ChatTemplate | None, call: HttpCall) -> ChatRequest:
    """Convert a Messages request into a chat request. `template`: the model's chat template. Raises: Problem.

    What is left out of the prompt is noted in `call`.
    """
    continues = _continues(message)
    choice = message.tool_choice
    tools = [_custom(each) for each in message.tools or () if not isinstance(each, dict)]
    call.reader.not_acted_upon += _left_out(message)
    chat: dict[str, Any] = {
        **request_fields(message),
        "messages": list(_messages(message, {tool.name: tool for tool in tools})),
        "tools": None if message.tools is None else [_tool(each) for each in tools],
        "continue_final_message": continues,
        "tool_choice": _choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        **_thinking(message, template, call),
        "reasoning_effort": _effort(message, template, call),
        "response_format": _format(message),
        "session_id": session_id(message, call),
        "keep_for_s": kept_for_s(message, bool(session_id(message, call))),
    }
    if isinstance(message, MessagesRequest):
        chat |= {name: getattr(message, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "stream")}
        chat |= {"stop": message.stop_sequences}
    return ChatRequest.model_validate(chat)


def _left_out(message: PromptFields) -> Iterator[str]:
    """Yield the provider's own tools, and types of blocks that are left out of the prompt."""
    for place, tool in enumerate(message.tools or ()):
        if isinstance(tool, dict):
            yield f"tools[{place}] ({tool['type']})"
    for turn in message.messages:
        for block in turn.content:
            if isinstance(block, dict):
                yield f"messages ({block['type']})"


def _custom(tool: CustomTool | ClientTool) -> CustomTool:
    """Return a tool with its description and schema."""
    if isinstance(tool, CustomTool):
        return tool
    form = CLIENT_TOOLS[tool.type]
    return CustomTool(
        name=tool.name,
        description=form.description,
        input_schema=form.schema,
        strict=tool.strict,
        defer_loading=tool.defer_loading,
    )


def _tool(tool: CustomTool) -> ChatPart:
    made = function_tool(tool.name, tool.description, tool.input_schema, tool.strict)
    return {**made, "defer_loading": tool.defer_loading}


def _messages(message: PromptFields, tools: Mapping[str, CustomTool]) -> Iterator[ChatPart]:
    if message.system:
        yield {"role": "system", "content": _text(message.system)}
    for turn in message.messages:
        yield from _turn(turn, tools)


def _continues(message: PromptFields) -> bool:
    """Return whether the answer continues the last turn, a text of the assistant. Raises: Problem for a call there."""
    last = message.messages[-1] if message.messages else None
    if not isinstance(last, AssistantTurn):
        return False
    if not isinstance(last.content, str) and not all(isinstance(block, TextBlock) for block in last.content[-1:]):
        place = f"messages[{len(message.messages) - 1}]"
        raise refused(f"{place}.role", "the last turn must be the user's, or end with a text that the answer continues")
    return True


def _turn(turn: UserTurn | AssistantTurn | SystemTurn, tools: Mapping[str, CustomTool]) -> Iterator[ChatPart]:
    """Yield the chat messages for a turn. A user turn yields one per tool result, then one for its text."""
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
    elif isinstance(turn, AssistantTurn):
        yield _answer(turn.content)
    else:
        for block in turn.content:
            if isinstance(block, ToolResultBlock):
                content = ("Error: " if block.is_error else "") + _result(block.content or "", tools)
                yield {"role": "tool", "content": content, "tool_call_id": block.tool_use_id}
        texts = list(_texts(turn.content))
        if texts:
            yield {"role": turn.role, "content": BETWEEN_BLOCKS.join(texts)}


def _texts(blocks: Iterable[object]) -> Iterator[str]:
    for block in blocks:
        match block:
            case TextBlock(text=text):
                yield text
            case DocumentBlock():
                yield BETWEEN_BLOCKS.join(part for part in (block.title, block.context, block.source.data) if part)


def _result(content: str | Sequence[TextBlock | ToolReference], tools: Mapping[str, CustomTool]) -> str:
    """Return the text of a tool's result. A reference to a tool becomes its description in JSON."""
    if isinstance(content, str):
        return content
    texts = []
    for block in content:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif (tool := tools.get(block.tool_name)) is not None:
            shown = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
            texts.append(json.dumps(shown, ensure_ascii=False))
        else:
            texts.append(block.tool_name)
    return BETWEEN_BLOCKS.join(texts)


def _answer(blocks: Sequence[TextBlock | ThinkingBlock | ToolUseBlock | Mapping[str, Any]]) -> ChatPart:
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        {"id": block.id, "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return {
        "role": "assistant",
        "content": BETWEEN_BLOCKS.join(_texts(blocks)),
        "reasoning_content": BETWEEN_BLOCKS.join(thoughts),
        "tool_calls": calls or None,
    }


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else BETWEEN_BLOCKS.join(block.text for block in content)


def _choice(choice: AnyTool | ForcedTool | None) -> str | ChatPart | None:
    if isinstance(choice, ForcedTool):
        return named_tool(choice.name)
    return None if choice is None else "required" if choice.type == "any" else choice.type


def _format(message: PromptFields) -> ChatPart | None:
    newer = message.output_config.format if message.output_config is not None else None
    form = newer or message.output_format
    return None if form is None else schema_format(form.schema_)


def _effort(message: PromptFields, template: ChatTemplate | None, call: HttpCall) -> str | None:
    """Return the effort if the template reads it. `thinking` alone decides whether the model reasons."""
    effort = message.output_config.effort if message.output_config is not None else None
    if effort is None or (template is not None and EFFORT in template.variables):
        return effort
    call.reader.not_acted_upon.append("output_config.effort")
    return None


def _thinking(message: PromptFields, template: ChatTemplate | None, call: HttpCall) -> ChatPart:
    """Return the chat's options on reasoning: absent `thinking` disables it, `adaptive` enables it.

    A model that has no choice reasons always or never, whatever the request says; the field is noted then.
    """
    given = message.thinking
    kind = given.type if given is not None else "disabled"
    if template is not None and THINKING in template.variables:
        budget = given.budget_tokens if given is not None and kind == "enabled" else None
        return {"enable_thinking": kind != "disabled", "thinking_budget": budget}
    if given is None or thinks(template) == (kind != "disabled"):
        return {"thinking_budget": given.budget_tokens if given is not None and kind == "enabled" else None}
    call.reader.not_acted_upon.append("thinking")
    return {}
