"""Answers as responses in OpenAI's format: items of reasoning, text and tool calls, in one object or as events."""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from baton.router.http.answers import created_now
from baton.router.http.dialects import Body
from baton.router.http.edge.problem import Problem
from baton.router.http.responses.bodies import ResponseRequest
from baton.router.http.responses.items import Item
from baton.router.http.responses.tools import FREE, FUNCTION, SHELL, free_input, is_forced, mapped_tools, shell_action
from baton.router.http.stream import PieceWriter, encoded_event
from baton.router.types.response import AnswerId, ChoiceFinished, Delta, FinishReason, Started, Summary, Usage
from baton.text.output.pieces import CallArguments, CallStart, OutputPiece, Thought
from baton.text.output.thoughts import OutputParser

Keep = Callable[["ResponseWriter"], Awaitable[None]]
"""Function that stores a complete response. It is called before the client learns that the response is complete."""


class _PartForm(NamedTuple):
    """Fields of the only content part of an item, and names of the part's events."""

    field: str  # field of the item that has the list of parts
    type: str
    text_event: str
    event: str
    logprobs: Mapping[str, Any] = {}  # empty list, which OpenAI's clients require for texts


_TEXT = _PartForm("content", "output_text", "output_text", "content_part", {"logprobs": []})
_REASONING = _PartForm("content", "reasoning_text", "reasoning_text", "content_part")
_SUMMARY = _PartForm("summary", "summary_text", "reasoning_summary_text", "reasoning_summary_part")


class ResponseWriter(PieceWriter):
    """Writer of an answer as a response, to which items are appended."""

    def __init__(
        self, message: ResponseRequest, request_id: str, parser: OutputParser, is_kept: bool, keep: Keep
    ) -> None:
        super().__init__(parser)
        self.id = f"{AnswerId.RESPONSE}{request_id}"
        self.is_kept = is_kept
        self.output: list[dict[str, Any]] = []
        self._request_id = request_id
        self._created = created_now()
        self._message = message
        self._keep = keep
        summarises = message.reasoning is not None and message.reasoning.summary is not None
        self._tools = {tool.function_name: tool for tool in mapped_tools(message)}
        # Names of tools whose calls are their text itself, not JSON.
        self._raw = {tool.name for tool in self._tools.values() if tool.grammar is not None and is_forced(message)}
        self._arguments = ""  # arguments of the last item, if it is a call
        self._parts = {"message": _TEXT, "reasoning": _SUMMARY if summarises else _REASONING}
        self._events = 0
        self._completed = 0  # time of completion, seconds since 1970

    def _begin(self, started: Started) -> Iterator[bytes]:
        yield self._event("response.created", response=self.content("in_progress"))
        yield self._event("response.in_progress", response=self.content("in_progress"))

    def _finish(self, end: ChoiceFinished, summary: Summary) -> Iterator[bytes]:
        """Yield all final events except the last, which `end` returns after the response is stored."""
        if not self.output:
            yield from self._open("message", {"role": "assistant", "content": []})
        self._completed = created_now()
        yield from self._close(self._status)

    async def end(self) -> bytes:
        await self._keep(self)
        return self._event(f"response.{self._status}", response=self.complete())

    def failed(self, problem: Problem) -> bytes:
        code = "rate_limit_exceeded" if problem.status is HTTPStatus.TOO_MANY_REQUESTS else "server_error"
        content = self.content("failed")
        content["error"] = {"code": code, "message": problem.message}
        return self._event("response.failed", response=content)

    def complete(self) -> dict[str, Any]:
        (_, summary), is_cut = self.ended, self._status == "incomplete"
        usage = summary.usage
        return self.content(self._status) | {
            "completed_at": None if is_cut else self._completed,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": response_usage(usage, self._parser.thought_tokens),
        }

    def content(self, status: str) -> dict[str, Any]:
        message = self._message
        reasoning, form = message.reasoning, message.text.format if message.text is not None else None
        choice = message.tool_choice or "auto"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": message.instructions,
            "max_output_tokens": message.max_output_tokens,
            "max_tool_calls": message.max_tool_calls,
            "metadata": message.metadata or {},
            "model": self.model,
            "system_fingerprint": self.version,
            "output": list(self.output),
            "parallel_tool_calls": message.parallel_tool_calls is not False,
            "previous_response_id": message.previous_response_id,
            "reasoning": {
                "effort": reasoning.effort if reasoning is not None else None,
                "summary": reasoning.summary if reasoning is not None else None,
            },
            "store": self.is_kept,
            "temperature": message.temperature,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [_tool(tool) for tool in message.tools or ()],
            "top_p": message.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": message.user,
        }

    @property
    def _status(self) -> str:
        end, _ = self.ended
        return "incomplete" if end.reason is FinishReason.LENGTH else "completed"

    def _add(self, pieces: Sequence[OutputPiece], delta: Delta | None) -> Iterator[bytes]:
        for piece in pieces:
            yield from self._piece(piece)

    def _piece(self, piece: OutputPiece) -> Iterator[bytes]:
        match piece:
            case str():
                yield from self._write("message", {"role": "assistant", "content": []}, piece)
            case Thought(text):
                yield from self._write("reasoning", {"summary": [], "content": []}, text)
            case CallStart(call_id=call_id, name=name):
                tool = self._tools.get(name)
                kind = FUNCTION if tool is None else tool.kind
                begun = {"call_id": call_id, "name": name, "arguments": ""} if tool is None else tool.begun(call_id)
                yield from self._open(kind, begun)
                self._arguments = ""
            case CallArguments(arguments=arguments):
                self._arguments += arguments
                if self.output[-1]["type"] == FUNCTION:
                    yield self._event("response.function_call_arguments.delta", **self._place, delta=arguments)

    def _write(self, kind: str, content: dict[str, Any], text: str) -> Iterator[bytes]:
        """Append a text to the last item. If its type is not `kind`, first open a new item with `content`."""
        if not self.output or self.output[-1]["type"] != kind:
            yield from self._open(kind, content)
        part = self._parts[kind]
        self.output[-1][part.field][0]["text"] += text
        yield self._event(f"response.{part.text_event}.delta", **self._at(part), delta=text, **part.logprobs)

    def _open(self, kind: str, content: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close("completed")
        item_id = _ITEM_IDS[kind] + self._request_id + (f"_{len(self.output)}" if self.output else "")
        item = {"type": kind, "id": item_id, "status": "in_progress", **content}
        self.output.append(item)
        yield self._event("response.output_item.added", output_index=len(self.output) - 1, item=item)
        if (part := self._parts.get(kind)) is not None:
            annotations: dict[str, Any] = {"annotations": []} if part.logprobs else {}
            item[part.field].append({"type": part.type, "text": "", **annotations, **part.logprobs})
            yield self._event(f"response.{part.event}.added", **self._at(part), part=item[part.field][0])

    def _close(self, status: str) -> Iterator[bytes]:
        if not self.output:
            return
        item = self.output[-1]
        item["status"] = status
        if (part := self._parts.get(item["type"])) is not None:
            text = item[part.field][0]["text"]
            yield self._event(f"response.{part.text_event}.done", **self._at(part), text=text, **part.logprobs)
            yield self._event(f"response.{part.event}.done", **self._at(part), part=item[part.field][0])
        else:
            yield from self._close_call(item)
        yield self._event("response.output_item.done", output_index=len(self.output) - 1, item=item)

    def _close_call(self, item: dict[str, Any]) -> Iterator[bytes]:
        """Set the complete arguments of a call. Free text is sent as one delta, since it was a text in JSON."""
        match item["type"]:
            case "custom_tool_call":
                item["input"] = self._arguments if item["name"] in self._raw else free_input(self._arguments)
                yield self._event("response.custom_tool_call_input.delta", **self._place, delta=item["input"])
                yield self._event("response.custom_tool_call_input.done", **self._place, input=item["input"])
            case "local_shell_call":
                item["action"] = shell_action(self._arguments)
            case _:
                item["arguments"] = self._arguments
                named = {"name": item["name"], "arguments": item["arguments"]}
                yield self._event("response.function_call_arguments.done", **self._place, **named)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}

    def _at(self, part: _PartForm) -> dict[str, Any]:
        """Return the fields that give the position of the last item's only part."""
        return {**self._place, f"{part.field}_index": 0}

    def _event(self, kind: str, **content: Any) -> bytes:
        event = encoded_event(kind, sequence_number=self._events, **content)
        self._events += 1
        return event


def response_usage(usage: Usage, thought_tokens: int) -> dict[str, Any]:
    """Return the object `usage` of a response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": thought_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


_ITEM_IDS = {"message": str(AnswerId.MESSAGE), "reasoning": "rs_", FUNCTION: "fc_", FREE: "ctc_", SHELL: "lsh_"}


def _tool(tool: Body | dict[str, Any]) -> Item:
    """Return a tool as the response repeats it. A function has two fields that are never absent at OpenAI."""
    given = tool if isinstance(tool, dict) else tool.model_dump(exclude_none=True)
    return {"parameters": None, "strict": None, **given} if given["type"] == "function" else given
