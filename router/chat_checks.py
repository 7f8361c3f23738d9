"""What is wrong with a conversation and its tools, before a template sees them. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from router.request import ChatPrompt, Message
from service.errors import InvalidArgument

MAX_MESSAGES = 4096
MAX_ROLE_CHARACTERS = 64
MAX_TOOLS = 128
MAX_TOOL_NAME_CHARACTERS = 64


def check_chat(prompt: ChatPrompt, max_text_bytes: int) -> ChatPrompt:
    """The same, safe to render. Raises: InvalidArgument.

    `max_text_bytes` is for all texts of the messages together, and once more for all tools.
    """
    return replace(
        prompt, messages=_messages(prompt.messages, max_text_bytes), tools=_tools(prompt.tools, max_text_bytes)
    )


def _messages(messages: Sequence[Message], max_text_bytes: int) -> tuple[Message, ...]:
    if not messages:
        raise InvalidArgument("messages", "at least one message is needed")
    if len(messages) > MAX_MESSAGES:
        raise InvalidArgument("messages", f"at most {MAX_MESSAGES} messages, not {len(messages)}")
    checked = tuple(messages)
    for index, message in enumerate(checked):
        if not message.role:
            raise InvalidArgument(f"messages[{index}].role", "is empty")
        if len(message.role) > MAX_ROLE_CHARACTERS:
            raise InvalidArgument(
                f"messages[{index}].role", f"at most {MAX_ROLE_CHARACTERS} characters, not {len(message.role)}"
            )
    if sum(map(_text_bytes, checked)) > max_text_bytes:
        raise InvalidArgument("messages", f"at most {max_text_bytes} bytes of text in all")
    return checked


def _text_bytes(message: Message) -> int:
    texts = [message.content, message.name, message.tool_call_id]
    for call in message.tool_calls:
        texts += [call.call_id, call.name, call.arguments]
    return sum(len(text.encode()) for text in texts)


def _tools(tools: Sequence[Mapping[str, Any]], max_text_bytes: int) -> tuple[Mapping[str, Any], ...]:
    if len(tools) > MAX_TOOLS:
        raise InvalidArgument("tools", f"at most {MAX_TOOLS} tools, not {len(tools)}")
    checked = tuple(tools)
    for index, tool in enumerate(checked):
        name = tool.get("function", {}).get("name", "")
        if not 0 < len(name) <= MAX_TOOL_NAME_CHARACTERS:
            raise InvalidArgument(f"tools[{index}].function.name", f"1 to {MAX_TOOL_NAME_CHARACTERS} characters")
    if sum(len(str(tool)) for tool in checked) > max_text_bytes:
        raise InvalidArgument("tools", f"at most {max_text_bytes} bytes in all")
    return checked
