"""Conversion of a Messages request of Anthropic's API into a chat request. Pure."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from baton.router.http.anthropic.bodies import (
    AnyTool,
    AssistantTurn,
    ForcedTool,
    MessagesRequest,
    OutputConfig,
    PromptFields,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserTurn,
)
from baton.router.http.chat_body import ChatPart, function_tool, named_tool, request_fields, schema_format
from baton.router.http.edge.problem import refused
from baton.router.http.messages import ChatRequest
from baton.router.http.requests import HttpCall, kept_for_s, session_id
from baton.router.model.chat_template import ChatTemplate
from baton.router.public.chat import asked_to_think

BETWEEN_BLOCKS = "\n"


def chat_of(message: PromptFields, template: ChatTemplate | None, call: HttpCall) -> ChatRequest:
    """Convert a Messages request into a chat request. `template`: the model's chat template. Raises: Problem."""
    _check_order(message)
    config, choice = message.output_config, message.tool_choice
    chat: dict[str, Any] = {
        **request_fields(message),
        "messages": [*_system(message), *(each for turn in message.messages for each in _turn(turn))],
        "tools": None
        if message.tools is None
        else [function_tool(each.name, each.description, each.input_schema, each.strict) for each in message.tools],
        "tool_choice": _choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "enable_thinking": _thinking(message, template),
        "thinking_budget": _budget(message),
        "reasoning_effort": config.effort if config is not None else None,
        "response_format": _format(config),
        "session_id": session_id(message, call),
        "keep_for_s": kept_for_s(message, bool(session_id(message, call))),
    }
    if isinstance(message, MessagesRequest):
        chat |= {name: getattr(message, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "stream")}
        chat |= {"stop": message.stop_sequences}
    return ChatRequest.model_validate(chat)


def _check_order(message: PromptFields) -> None:
    """Check that the last turn is a user turn. Raises: Problem."""
    if message.messages and isinstance(message.messages[-1], AssistantTurn):
        last = len(message.messages) - 1
        raise refused(f"messages[{last}].role", "the last turn must be the user's; /v1/completions can continue a text")


def _system(message: PromptFields) -> Iterator[ChatPart]:
    if message.system:
        yield {"role": "system", "content": _text(message.system)}


def _turn(turn: UserTurn | AssistantTurn) -> Iterator[ChatPart]:
    """Yield the chat messages for a turn. A user turn yields one per tool result, then one for its text."""
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
    elif isinstance(turn, AssistantTurn):
        yield _answer(turn.content)
    else:
        texts = [block for block in turn.content if isinstance(block, TextBlock)]
        for block in turn.content:
            if isinstance(block, ToolResultBlock):
                content = ("Error: " if block.is_error else "") + _text(block.content or "")
                yield {"role": "tool", "content": content, "tool_call_id": block.tool_use_id}
        if texts:
            yield {"role": "user", "content": _text(texts)}


def _answer(blocks: Sequence[TextBlock | ThinkingBlock | ToolUseBlock]) -> ChatPart:
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        {"id": block.id, "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return {
        "role": "assistant",
        "content": _text([block for block in blocks if isinstance(block, TextBlock)]),
        "reasoning_content": BETWEEN_BLOCKS.join(thoughts),
        "tool_calls": calls or None,
    }


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else BETWEEN_BLOCKS.join(block.text for block in content)


def _choice(choice: AnyTool | ForcedTool | None) -> str | ChatPart | None:
    if isinstance(choice, ForcedTool):
        return named_tool(choice.name)
    return None if choice is None else "required" if choice.type == "any" else choice.type


def _format(config: OutputConfig | None) -> ChatPart | None:
    if config is None or config.format is None:
        return None
    return schema_format(config.format.schema_)


def _thinking(message: PromptFields, template: ChatTemplate | None) -> bool | None:
    """Return the chat's `enable_thinking`: false if `thinking` is absent, true if it is `adaptive`.

    None if the template has no such option. Raises: InvalidArgument if the model cannot do what was asked.
    """
    kind = message.thinking.type if message.thinking is not None else None
    asked = {"enabled": True, "disabled": False}.get(kind or "")
    return asked_to_think(asked, kind == "adaptive", "thinking", template)


def _budget(message: PromptFields) -> int | None:
    thinking = message.thinking
    return thinking.budget_tokens if thinking is not None and thinking.type == "enabled" else None
