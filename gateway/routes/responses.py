"""POST /v1/responses: text, whole or as the events that OpenAI's clients know. Nothing is stored."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from baton.gateway.answers import collect, created_now
from baton.gateway.http.exchange import Reply, Streamed, json_reply
from baton.gateway.http.problem import Problem, Renamed, problem_of
from baton.gateway.messages import ResponseRequest
from baton.gateway.requests import Call, response_request
from baton.router.dispatcher import Dispatcher
from baton.router.types.response import AnswerId, Delta, Finished, FinishReason, ResponseEvent, Started, Usage
from baton.service.errors import BatonError

RENAMED: Renamed = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "session": "x-session-id",
}


async def answer_response(dispatcher: Dispatcher, message: ResponseRequest, call: Call) -> Reply:
    """Raises: Problem, BatonError."""
    request = response_request(message, call)
    response = _Response(message, request.request_id)
    events = dispatcher.answer(request, None, call.trace, reader=call.reader)
    if message.stream:
        return Streamed(_events(response, events))
    whole = await collect(events)
    response.model = whole.model
    choice = whole.choices[0]
    response.text = choice.text
    cut = choice.end is not None and choice.end.reason is FinishReason.LENGTH
    return json_reply(response.finished(cut, whole.usage))


class _Response:
    """One response object, and the one message in it."""

    def __init__(self, message: ResponseRequest, request_id: str) -> None:
        self.item_id = f"{AnswerId.MESSAGE}{request_id}"
        self.model = ""
        self.text = ""
        self._id = f"{AnswerId.RESPONSE}{request_id}"
        self._created = created_now()
        self._message = message

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def item(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part()]
        return {"type": "message", "id": self.item_id, "role": "assistant", "status": status, "content": content}

    def finished(self, cut: bool, usage: Usage) -> dict[str, Any]:
        status = "incomplete" if cut else "completed"
        content = self.content(status, [self.item(status)])
        content["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        content["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        return content

    def content(self, status: str, output: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        message = self._message
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": message.instructions,
            "max_output_tokens": message.max_output_tokens,
            "metadata": message.metadata or {},
            "model": self.model,
            "output": output or [],
            "parallel_tool_calls": False,
            "temperature": message.temperature,
            "text": {"format": _format(message)},
            "tool_choice": "none",
            "tools": [],
            "top_p": message.top_p,
            "usage": None,
        }


def _format(message: ResponseRequest) -> dict[str, Any]:
    form = message.text.format if message.text is not None else None
    return {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)


async def _events(response: _Response, events: AsyncGenerator[ResponseEvent, None]) -> AsyncGenerator[bytes, None]:
    """Raises: BatonError, before the first."""
    number = 0

    def event_bytes(kind: str, **content: Any) -> bytes:
        nonlocal number
        data = json.dumps({"type": kind, "sequence_number": number, **content}, ensure_ascii=False)
        number += 1
        return f"event: {kind}\ndata: {data}\n\n".encode()

    place = {"item_id": response.item_id, "output_index": 0, "content_index": 0}
    try:
        async with aclosing(events):
            async for event in events:
                match event:
                    case Started():
                        response.model = event.model
                        yield event_bytes("response.created", response=response.content("in_progress"))
                        yield event_bytes("response.in_progress", response=response.content("in_progress"))
                        yield event_bytes(
                            "response.output_item.added", output_index=0, item=response.item("in_progress")
                        )
                        yield event_bytes("response.content_part.added", **place, part=response.part())
                    case Delta() if event.text:
                        response.text += event.text
                        yield event_bytes("response.output_text.delta", **place, delta=event.text, logprobs=[])
                    case Finished(choice, summary) if summary is not None:
                        cut = choice.reason is FinishReason.LENGTH
                        status = "incomplete" if cut else "completed"
                        yield event_bytes("response.output_text.done", **place, text=response.text, logprobs=[])
                        yield event_bytes("response.content_part.done", **place, part=response.part())
                        yield event_bytes("response.output_item.done", output_index=0, item=response.item(status))
                        yield event_bytes(f"response.{status}", response=response.finished(cut, summary.usage))
    except BatonError as error:
        if number == 0:
            raise
        problem: Problem = problem_of(error, RENAMED)
        failed = response.content("failed")
        failed["error"] = {"code": problem.code or "server_error", "message": problem.message}
        yield event_bytes("response.failed", response=failed)
