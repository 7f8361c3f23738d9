"""Items of a conversation in the format in which they are stored, and their conversion into chat messages. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from baton.router.http.responses.bodies import (
    CallItem,
    CallOutputItem,
    CompactionItem,
    ContentPart,
    CustomCallItem,
    CustomOutputItem,
    GivenItem,
    InputMessage,
    ReasoningItem,
    ShellCallItem,
    ShellOutputItem,
)
from baton.router.http.responses.compaction import opened, summary_message
from baton.router.http.responses.tools import CALLS, function_call
from baton.router.types.response import AnswerId

Item = Mapping[str, Any]
"""An item as the API lists it; each has an id."""
Chat = dict[str, Any]
"""Message in the body of a chat."""
BETWEEN_THOUGHTS = "\n"


def given_items(given: str | Sequence[GivenItem | Item], request_id: str) -> list[Item]:
    """Convert a request's input to items. An item without an id gets one that is derived from the request's id.

    Items of the provider's own tools are left out.
    """
    if isinstance(given, str):
        given = [InputMessage(role="user", content=given)]
    numbered = enumerate(given)
    return [_item(each, f"{request_id}_in_{place}") for place, each in numbered if not isinstance(each, Mapping)]


def _item(given: GivenItem, name: str) -> Item:
    match given:
        case InputMessage():
            parts = [_part(given.role, text) for text in _texts(given.content)]
            content = {"role": given.role, "content": parts}
            return {"type": "message", "id": given.id or AnswerId.MESSAGE + name, "status": "completed", **content}
        case CallItem():
            content = {"call_id": given.call_id, "name": given.name, "arguments": given.arguments}
            return _call_item(given, f"fc_{name}", content)
        case CustomCallItem():
            content = {"call_id": given.call_id, "name": given.name, "input": given.input}
            return _call_item(given, f"ctc_{name}", content)
        case ShellCallItem():
            action = given.action.model_dump(exclude_none=True)
            return _call_item(given, f"lsh_{name}", {"call_id": given.call_id, "action": action})
        case CallOutputItem() | CustomOutputItem():
            output = "".join(_texts(given.output))
            content = {"call_id": given.call_id, "output": output, "status": "completed"}
            return {"type": given.type, "id": given.id or f"fc_{name}", **content}
        case ShellOutputItem():
            own = given.id or f"lsho_{name}"
            content = {"call_id": given.call_id or own, "output": given.output, "status": "completed"}
            return {"type": given.type, "id": own, **content}
        case ReasoningItem():
            summary = [{"type": "summary_text", "text": each.text} for each in given.summary]
            thoughts = [{"type": "reasoning_text", "text": each.text} for each in given.content or ()]
            return {"type": given.type, "id": given.id or f"rs_{name}", "summary": summary, "content": thoughts}
        case CompactionItem(encrypted_content=content):
            opened(content)  # called to reject the items of other servers
            return {"type": "compaction", "id": given.id or f"cmp_{name}", "encrypted_content": content}


def _call_item(given: CallItem | CustomCallItem | ShellCallItem, name: str, content: Chat) -> Item:
    namespace = getattr(given, "namespace", None)
    item = {"type": given.type, "id": given.id or name, "status": "completed", **content}
    return item if namespace is None else {**item, "namespace": namespace}


def _part(role: str, text: str) -> Item:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": text}


def _texts(content: str | Sequence[ContentPart]) -> list[str]:
    return [content] if isinstance(content, str) else [part.text for part in content]


def chat_messages(items: Sequence[Item]) -> Iterator[Chat]:
    """Yield the chat messages for items. Consecutive reasoning, text and calls become one message of the assistant."""
    turn: Chat = {}
    for item in items:
        kind = item["type"]
        is_assistants = kind in ("reasoning", *CALLS) or item.get("role") == "assistant"
        if turn and (not is_assistants or (kind not in CALLS and turn.keys() & {"content", "tool_calls"})):
            yield _turn(turn)
            turn = {}
        match kind:
            case "reasoning":
                thoughts = [part["text"] for part in item.get("content") or item["summary"]]
                turn.setdefault("thoughts", []).extend(thoughts)
            case "function_call" | "custom_tool_call" | "local_shell_call":
                turn.setdefault("tool_calls", []).append({"id": item["call_id"], "function": function_call(item)})
            case "message" if is_assistants:
                turn["content"] = _text(item)
            case "compaction":
                yield summary_message(item["encrypted_content"])
            case "message":
                yield {"role": item["role"], "content": _text(item)}
            case _:
                yield {"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]}
    if turn:
        yield _turn(turn)


def _turn(turn: Chat) -> Chat:
    thoughts = BETWEEN_THOUGHTS.join(turn.pop("thoughts", ()))
    return {"role": "assistant", "content": "", "reasoning_content": thoughts, **turn}


def _text(message: Item) -> str:
    return "".join(part["text"] for part in message["content"])
