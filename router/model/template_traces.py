"""Detection of message parts that a chat template silently drops: roles, tool calls, names and reasoning.

For each template, small conversations with a marked text are rendered once: a part is dropped if the prompt lacks the
mark. A template that rejects a part is no problem: the client gets its error.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.router.types.request import Message

Entry = dict[str, Any]
Render = Callable[[Sequence[Entry]], str | None]
"""Function that renders a conversation; it returns None if the template rejects the conversation."""
MARK = "zqxmark"
OTHER = "zqxrole"
"""Name of a role that no template knows."""
_PLAIN_ROLES = ("user", "assistant", "system")
LATE, TWO_SYSTEMS, TWO_USERS = "late system", "two systems", "two users"
"""Names of sequences: a system message after a user's, two system messages, two messages of the user."""
_SEQUENCES = (LATE, TWO_SYSTEMS, TWO_USERS)
_PARAGRAPH = "\n\n"
_USER: Entry = {"role": "user", "content": "a"}
_ANSWER: Entry = {"role": "assistant", "content": "b"}
_CALLED = {"id": "abcdefghi", "type": "function", "function": {"name": MARK, "arguments": f'{{"a": "{MARK}"}}'}}
_CALLS: Entry = {"role": "assistant", "content": "", "tool_calls": [_CALLED]}
_RESULT: Entry = {"role": "tool", "content": "c", "name": "f", "tool_call_id": "abcdefghi"}


class NotShown(Exception):
    """Error: the chat template would silently drop `field` of a message."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(f"this model's chat template does not show {what}")
        self.field = field


@dataclass(frozen=True, slots=True)
class Traces:
    """Parts of conversations that a template silently `drops`, and roles that it `refuses`."""

    drops: frozenset[str] = frozenset()
    refuses: frozenset[str] = frozenset()


def find_traces(render: Render) -> Traces:
    """Return what a template drops and refuses: names of roles, and `tool_calls`, `name` and `reasoning`. Blocks."""
    found = {part: _state(render, each, part in _SEQUENCES) for part, each in _conversations()}
    return Traces(
        frozenset(part for part, state in found.items() if state is False),
        frozenset(part for part, state in found.items() if state is None),
    )


def _state(render: Render, conversations: Sequence[Sequence[Entry]], in_all: bool) -> bool | None:
    """Return whether any rendered conversation contains MARK (`in_all`: every one); None if the template rejects all
    of them (`in_all`: any).
    """
    prompts = [prompt for each in conversations if (prompt := render(each)) is not None]
    if in_all:
        return all(MARK in prompt for prompt in prompts) if len(prompts) == len(conversations) else None
    return any(MARK in prompt for prompt in prompts) if prompts else None


def _conversations() -> Iterator[tuple[str, Sequence[Sequence[Entry]]]]:
    for role in ("system", "developer", "tool", OTHER):
        said = {"role": role, "content": MARK, "tool_call_id": "abcdefghi"}
        plain = {**_CALLED, "function": {"name": "f", "arguments": "{}"}}
        calls = {**_CALLS, "tool_calls": [plain]}
        yield role, ([said, _USER], [_USER, said], [_USER, calls, said], [_USER, _ANSWER, said], [said])
    yield "tool_calls", ([_USER, _CALLS], [_USER, _CALLS, _RESULT], [_USER, _CALLS, _RESULT, _ANSWER, _USER])
    named = {"name": MARK}
    yield (
        "name",
        ([_USER | named], [_USER, _ANSWER | named, _USER], [{"role": "system", "content": "s"} | named, _USER]),
    )
    said = {"role": "system", "content": MARK}
    yield LATE, ([_USER, said], [_USER, _ANSWER, said], [_USER, said, _ANSWER, _USER])
    yield TWO_SYSTEMS, ([{"role": "system", "content": "s"}, said, _USER],)
    yield TWO_USERS, ([{"role": "user", "content": MARK}, _USER], [_USER, {"role": "user", "content": MARK}])
    thought = {**_ANSWER, "reasoning_content": MARK, "thinking": MARK}
    calling = {**_CALLS, "reasoning_content": MARK, "thinking": MARK, "tool_calls": [plain]}
    yield "reasoning", ([_USER, thought], [_USER, thought, _USER], [_USER, calling, _RESULT])


def is_plain(message: "Message") -> bool:
    """Return whether the message has only parts that every template shows."""
    return message.role in _PLAIN_ROLES and not (message.tool_calls or message.name or message.reasoning)


def is_plain_sequence(messages: "Sequence[Message]") -> bool:
    """Return whether every template shows messages of these roles in this order, if it shows each of them."""
    roles = [message.role for message in messages]
    return "system" not in roles[1:] and ("user", "user") not in pairwise(roles)


def in_order(messages: "Sequence[Message]", traces: Traces) -> "list[Message]":
    """Return the messages in an order that the template shows, without moving any text to an earlier place.

    If the template does not show it, a system message that follows another joins it, a later one becomes a part of the
    user's text, and messages of the user that follow each other are joined.
    """
    lost, made = traces.drops | traces.refuses, list["Message"]()
    for message in messages:
        last = made[-1] if made else None
        if message.role == "system":
            if last is not None and all(each.role == "system" for each in made):
                if TWO_SYSTEMS in lost:
                    made[-1] = _joined(last, message.content)
                    continue
            elif (last is not None and LATE in lost) or (last is None and "system" in traces.refuses):
                reminder = (
                    message.content if last is None else f"<system-reminder>\n{message.content}\n</system-reminder>"
                )
                message = replace(message, role="user", content=reminder)
        joins = TWO_USERS in traces.refuses or "system" in traces.refuses
        if message.role == "user" and last is not None and last.role == "user" and joins and not message.name:
            made[-1] = _joined(last, message.content)
        else:
            made.append(message)
    return made


def _joined(message: "Message", text: str) -> "Message":
    return replace(message, content=f"{message.content}{_PARAGRAPH}{text}")


def shown(messages: "Sequence[Message]", traces: Traces, source: str, thinks: bool) -> "list[Message]":
    """Return the messages to render, `in_order`. Raises: NotShown.

    Role `developer` becomes `system` if only `system` is known.

    Names of tool messages may be dropped, since they repeat those of the calls. `thinks`: the model reasons, and its
    template drops earlier reasoning on purpose.
    """
    return in_order([_shown(place, each, traces, source, thinks) for place, each in enumerate(messages)], traces)


def _shown(place: int, message: "Message", traces: Traces, source: str, thinks: bool) -> "Message":
    field, lost = f"messages[{place}]", traces.drops
    if message.role == "developer" and message.role in lost | traces.refuses and "system" not in lost:
        message = replace(message, role="system")
    is_known = message.role in _PLAIN_ROLES or message.role in source
    if message.role in lost or (OTHER in lost and not is_known and message.role not in ("developer", "tool")):
        raise NotShown(f"{field}.role", f"messages of the role {message.role!r}")
    if message.tool_calls and "tool_calls" in lost:
        raise NotShown(f"{field}.tool_calls", "earlier calls of functions")
    if message.name and message.role != "tool" and "name" in lost:
        raise NotShown(f"{field}.name", "names of speakers; put the name into the content")
    if message.reasoning and "reasoning" in lost and not thinks:
        raise NotShown(f"{field}.reasoning", "reasoning, and the model has none")
    return message
