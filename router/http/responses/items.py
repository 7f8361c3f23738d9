"""Items of a conversation in the format in which they are stored, and their conversion into chat messages. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from baton.router.http.responses.bodies import CallItem, CallOutputItem, ContentPart, InputMessage, ReasoningItem
from baton.router.types.response import AnswerId

Item = Mapping[str, Any]
"""An item as the API lists it; each has an id."""
Chat = dict[str, Any]
"""Message in the body of a chat."""
BETWEEN_THOUGHTS = "\n"


def given_items(
    given: str | Sequence[InputMessage | CallItem | CallOutputItem | ReasoningItem], request_id: str
) -> list[Item]:
    """Convert a request's input to items. An item without an id gets one that is derived from the request's id."""
    if isinstance(given, str):
        given = [InputMessage(role="user", content=given)]
    return [_item(each, f"{request_id}_in_{place}") for place, each in enumerate(given)]


def _item(given: InputMessage | CallItem | CallOutputItem | ReasoningItem, name: str) -> Item:
    match given:
        case InputMessage():
            parts = [_part(given.role, text) for text in _texts(given.content)]
            content = {"role": given.role, "content": parts}
            return {"type": "message", "id": given.id or AnswerId.MESSAGE + name, "status": "completed", **content}
        case CallItem():
            content = {"call_id": given.call_id, "name": given.name, "arguments": given.arguments}
            return {"type": given.type, "id": given.id or f"fc_{name}", "status": "completed", **content}
        case CallOutputItem():
            output = "".join(_texts(given.output))
            content = {"call_id": given.call_id, "output": output, "status": "completed"}
            return {"type": given.type, "id": given.id or f"fc_{name}", **content}
        case ReasoningItem():
            summary = [{"type": "summary_text", "text": each.text} for each in given.summary]
            thoughts = [{"type": "reasoning_text", "text": each.text} for each in given.content or ()]
            return {"type": given.type, "id": given.id or f"rs_{name}", "summary": summary, "content": thoughts}


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
        is_assistants = kind in ("reasoning", "function_call") or item.get("role") == "assistant"
        if turn and (not is_assistants or (kind != "function_call" and turn.keys() & {"content", "tool_calls"})):
            yield _turn(turn)
            turn = {}
        match kind:
            case "reasoning":
                thoughts = [part["text"] for part in item.get("content") or item["summary"]]
                turn.setdefault("thoughts", []).extend(thoughts)
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                turn.setdefault("tool_calls", []).append({"id": item["call_id"], "function": function})
            case "message" if is_assistants:
                turn["content"] = _text(item)
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
