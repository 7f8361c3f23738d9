"""Chats over gRPC: conversion of a chat's options from protobuf, and of its answer's parts to protobuf."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from baton.process.errors import InvalidArgument
from baton.protos import baton_pb2
from baton.router.model.validation import MAX_MESSAGES, MAX_TOOLS
from baton.router.public.chat import EFFORT, THINKING, ChatAsked, ReadChat
from baton.router.public.tools import Function, ToolChoice, ToolsAsked
from baton.router.types.request import Message, ToolCall
from baton.router.types.response import Delta, FinishReason
from baton.text.output.pieces import CallArguments, CallStart, OutputPiece, Thought
from baton.text.output.thoughts import OutputParser
from baton.text.structured.json_text import JsonRefused, read_json

_CALLS = {
    baton_pb2.CALLS_UNSPECIFIED: ToolChoice.AUTO,
    baton_pb2.CALLS_NONE: ToolChoice.NONE,
    baton_pb2.CALLS_REQUIRED: ToolChoice.REQUIRED,
}
_PLAIN = (
    *("messages", "request_id", "model", "sampling", "cache_salt", "priority", "ttft_slo_ms", "tbt_slo_ms"),
    *("session_id", "keep_for_s", "done"),
)
"""Fields of a ChatRequest that require no parser of the answer and no template option."""


def is_plain(message: baton_pb2.ChatRequest) -> bool:
    """Return whether the answer is plain text and the template gets only the messages."""
    return all(field.name in _PLAIN for field, _ in message.ListFields())


def chat_messages(message: baton_pb2.ChatRequest) -> list[Message]:
    # Only one message more than the maximum is read: it suffices for the validator to reject the request.
    return [
        Message(
            each.role,
            each.content,
            each.name,
            # Most messages have no tool calls: for them no generator is created.
            tuple(ToolCall(call.id, call.name, call.arguments) for call in each.tool_calls) if each.tool_calls else (),
            each.tool_call_id,
            each.reasoning,
        )
        for each in message.messages[: MAX_MESSAGES + 1]
    ]


def chat_asked(message: baton_pb2.ChatRequest) -> ChatAsked:
    """Convert the options of a chat. Raises: InvalidArgument."""
    tools = [_tool(f"tools[{place}]", each) for place, each in enumerate(message.tools[: MAX_TOOLS + 1])]
    one_call = message.HasField("parallel_tool_calls") and not message.parallel_tool_calls
    budget = message.thinking_budget if message.HasField("thinking_budget") else None
    options = message.chat_template_kwargs
    return ChatAsked(
        tools=ToolsAsked(tools, _choice(message.tool_choice), one_call),
        template_options=_json_object("chat_template_kwargs", options) if options else {},
        enable_thinking=message.enable_thinking if message.HasField("enable_thinking") else None,
        effort=message.reasoning_effort or None,
        budget=budget,
        shows_thoughts=message.include_reasoning or not message.HasField("include_reasoning"),
        has_parts=message.parts or bool(tools) or budget is not None,
    )


def _tool(path: str, tool: baton_pb2.Tool) -> Mapping[str, Any]:
    """Convert a tool to the JSON object that templates get. `path`: its field. Raises: InvalidArgument."""
    if tool.WhichOneof("tool") is None:
        raise InvalidArgument(path, "function is required")
    given, function = tool.function, dict[str, Any](name=tool.function.name)
    if given.description:
        function["description"] = given.description
    if given.parameters:
        as_object = {"true": "{}"}.get(given.parameters.strip(), given.parameters)  # schema `true` means `{}`
        function["parameters"] = _json_object(f"{path}.function.parameters", as_object)
    return {"type": "function", "function": function}


def _choice(choice: baton_pb2.ToolChoice) -> ToolChoice | Function:
    """Convert the tool choice. Raises: InvalidArgument."""
    if choice.WhichOneof("choice") == "function":
        return Function(choice.function)
    if choice.calls not in _CALLS:
        raise InvalidArgument("tool_choice.calls", f"unknown value {choice.calls}; use 0 to {len(_CALLS) - 1}")
    return _CALLS[choice.calls]


def _json_object(path: str, text: str) -> dict[str, Any]:
    """Parse a JSON object in the field `path`. Raises: InvalidArgument."""
    try:
        read = read_json(text)
    except JsonRefused as refusal:
        raise InvalidArgument(path, str(refusal)) from refusal
    if not isinstance(read, dict):
        raise InvalidArgument(path, "must be a JSON object")
    return read


def in_own_words(error: InvalidArgument, tool_forms: Set[str]) -> InvalidArgument:
    """Return the error with its field renamed to the field of the client's chat that caused it.

    `tool_forms`: fields of structured output that was derived from the tools.
    """
    if error.field in tool_forms:
        return InvalidArgument("tools", error.description, error.reason, error.metadata)
    given = error.field.removeprefix("template_options.")
    if given == error.field:
        return error
    name = given if given in (THINKING, EFFORT) else f"chat_template_kwargs.{given}"
    return InvalidArgument(name, error.description, error.reason, error.metadata)


@dataclass(slots=True)
class _ReadChoice:
    """State of one choice. `calls`, `text_bytes`: calls and bytes of text still to skip, since the client has them."""

    reader: OutputParser
    tokens: int = 0  # delivered tokens, including those that the client already had
    calls: int = 0
    text_bytes: int = 0
    is_ended: bool = False  # the client has the complete choice

    def lacks(self, pieces: Sequence[OutputPiece]) -> Iterator[OutputPiece]:
        """Yield the pieces that the client lacks, after skipping `calls` call starts and `text_bytes` bytes of text."""
        for piece in pieces:
            if isinstance(piece, CallStart):
                if not self.calls:
                    yield piece
                self.calls = max(0, self.calls - 1)
            elif rest := self._rest(_text_of(piece)):
                yield _with_text(piece, rest)

    def _rest(self, text: str) -> str:
        if not self.text_bytes:
            return text
        encoded = text.encode()
        left_out = min(len(encoded), self.text_bytes)
        self.text_bytes -= left_out
        return encoded[left_out:].decode(errors="replace")


def _text_of(piece: str | Thought | CallArguments) -> str:
    return piece if isinstance(piece, str) else piece.text if isinstance(piece, Thought) else piece.arguments


def _with_text(piece: str | Thought | CallArguments, text: str) -> OutputPiece:
    match piece:
        case Thought():
            return Thought(text)
        case CallArguments(index):
            return CallArguments(index, text)
    return text


class Parts:
    """Splits a chat's answer into parts: text, reasoning and tool calls.

    `received`: complete and partial choices that the client of a resumed stream already has.
    """

    def __init__(self, chat: ReadChat, received: Sequence[baton_pb2.ReceivedChoice] = ()) -> None:
        self.tool_forms = chat.tool_forms
        self._chat = chat
        self._is_resumed = bool(received)
        self._choices = {
            each.index: _ReadChoice(chat.reader(), len(each.token_ids), each.calls, each.text_bytes, each.finished)
            for each in received
        }

    def of(self, delta: Delta) -> Iterator[Delta | baton_pb2.ChatResponse]:
        """Yield the parts of a delta: first its tokens with the leading text, then the other parts."""
        choice = self._choice(delta.index)
        if choice.is_ended:
            return
        pieces = list(choice.lacks(choice.reader.push(delta.text, len(delta.token_ids))))
        if delta.token_ids:
            text = pieces.pop(0) if pieces and isinstance(pieces[0], str) else ""
            choice.tokens = delta.offset + len(delta.token_ids)
            yield Delta(delta.index, delta.offset, delta.token_ids, str(text), delta.logprobs)
        yield from self._parts(delta.index, choice, pieces)

    def rest(self, index: int) -> Iterator[Delta | baton_pb2.ChatResponse]:
        """Yield the parts that the parser withheld until the end of the choice."""
        choice = self._choice(index)
        yield from self._parts(index, choice, list(choice.lacks(choice.reader.finish())))

    def end(self, finished: baton_pb2.Finished, reason: FinishReason) -> None:
        """Complete a Finished message: set the reason TOOL_CALLS if the choice has calls, and the reasoning tokens."""
        if reason is FinishReason.STOP and self._choice(finished.index).reader.calls:
            finished.reason = baton_pb2.FINISH_REASON_TOOL_CALLS
        readers = [choice.reader for choice in self._choices.values()]
        if finished.HasField("usage") and not self._is_resumed and any(reader.thinks for reader in readers):
            finished.usage.reasoning_tokens = sum(reader.thought_tokens for reader in readers)

    def _choice(self, index: int) -> _ReadChoice:
        return self._choices.get(index) or self._choices.setdefault(index, _ReadChoice(self._chat.reader()))

    def _parts(
        self, index: int, choice: _ReadChoice, pieces: Sequence[OutputPiece]
    ) -> Iterator[Delta | baton_pb2.ChatResponse]:
        for piece in pieces:
            match piece:
                case Thought(text):
                    yield baton_pb2.ChatResponse(thought=baton_pb2.ThoughtPart(index=index, text=text))
                case CallStart(call, call_id, name):
                    begins = baton_pb2.CallBegins(index=index, call=call, id=call_id, name=name)
                    yield baton_pb2.ChatResponse(call_begins=begins)
                case CallArguments(call, arguments):
                    part = baton_pb2.CallPart(index=index, call=call, arguments=arguments)
                    yield baton_pb2.ChatResponse(call=part)
                case str():
                    yield Delta(index, choice.tokens, (), piece, ())
