"""An answer as Anthropic's clients read it: blocks of thoughts, text and calls, whole or as events."""

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from baton.gateway.anthropic.request import RENAMED
from baton.gateway.http.problem import Dialect, Problem, problem_of
from baton.gateway.output.thoughts import OutputParser, OutputPiece, Thought
from baton.gateway.output.tool_calls import CallBegins, CallGoesOn
from baton.router.types.response import ChoiceFinished, Delta, Finished, FinishReason, ResponseEvent, Started, Usage
from baton.service.errors import BatonError


@dataclass(slots=True)
class _Block:
    content: dict[str, Any]
    arguments: str = ""  # of a call, as JSON


class Answer:
    """One message, which grows by pieces. `events` of its growth are what a stream sends."""

    def __init__(self, message_id: str, parser: OutputParser) -> None:
        self._id = message_id
        self._parser = parser
        self._blocks: list[_Block] = []
        self.model = ""

    def begin(self, started: Started) -> Iterator[bytes]:
        self.model = started.model
        yield _event("message_start", message=self._message(None, Usage(started.prompt_tokens, 0, 0)))

    def grow(self, delta: Delta) -> Iterator[bytes]:
        for piece in self._parser.push(delta.text, len(delta.token_ids)):
            yield from self._add(piece)

    def end(self, end: ChoiceFinished, usage: Usage) -> Iterator[bytes]:
        for piece in self._parser.finish():
            yield from self._add(piece)
        yield from self._close()
        yield _event("message_delta", delta=self._stop(end), usage=_usage(usage))
        yield _event("message_stop")

    def whole(self, end: ChoiceFinished, usage: Usage) -> dict[str, Any]:
        return self._message(end, usage)

    def _add(self, piece: OutputPiece) -> Iterator[bytes]:
        match piece:
            case str():
                yield from self._open("text", {"type": "text", "text": ""})
                yield self._delta("text_delta", "text", piece)
            case Thought(text):
                yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta("thinking_delta", "thinking", text)
            case CallBegins(call_id=call_id, name=name):
                call = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                yield from self._open("", call)
            case CallGoesOn(arguments=arguments):
                self._blocks[-1].arguments += arguments
                place, delta = len(self._blocks) - 1, {"type": "input_json_delta", "partial_json": arguments}
                yield _event("content_block_delta", index=place, delta=delta)

    def _open(self, kind: str, content: dict[str, Any]) -> Iterator[bytes]:
        """Unless the last block is of that kind; each call has a block of its own."""
        if self._blocks and self._blocks[-1].content["type"] == kind:
            return
        yield from self._close()
        yield _event("content_block_start", index=len(self._blocks), content_block=content)
        self._blocks.append(_Block(dict(content)))

    def _close(self) -> Iterator[bytes]:
        if self._blocks:
            yield _event("content_block_stop", index=len(self._blocks) - 1)

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        self._blocks[-1].content[name] += text
        return _event("content_block_delta", index=len(self._blocks) - 1, delta={"type": kind, name: text})

    def _message(self, end: ChoiceFinished | None, usage: Usage) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [_content(block) for block in self._blocks],
            **self._stop(end),
            "usage": _usage(usage),
        }

    def _stop(self, end: ChoiceFinished | None) -> dict[str, Any]:
        if end is None:
            return {"stop_reason": None, "stop_sequence": None}
        if end.reason is FinishReason.LENGTH:
            reason = "max_tokens"
        elif end.stop_text is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._parser.calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": end.stop_text}


def _content(block: _Block) -> dict[str, Any]:
    """Arguments that are cut, or no object, are shown as they are, under a name that no schema has."""
    if block.content["type"] != "tool_use":
        return block.content
    try:
        arguments = json.loads(block.arguments or "{}")
    except ValueError:
        arguments = None
    return {**block.content, "input": arguments if isinstance(arguments, dict) else {"_raw": block.arguments}}


def _usage(usage: Usage) -> dict[str, int]:
    """Anthropic's counts exclude each other."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _event(kind: str, **content: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **content}, ensure_ascii=False)}\n\n".encode()


async def stream(answer: Answer, events: AsyncGenerator[ResponseEvent, None]) -> AsyncGenerator[bytes, None]:
    """An error after the first event is an event. Raises: BatonError, before that."""
    begun = False
    try:
        async with aclosing(events):
            async for event in events:
                chunk = b"".join(_grown(answer, event))
                if chunk:
                    begun = True
                    yield chunk
    except BatonError as error:
        if not begun:
            raise
        problem: Problem = problem_of(error, RENAMED)
        yield _event("error", error=problem.content_for(Dialect.ANTHROPIC)["error"])


async def whole(answer: Answer, events: AsyncGenerator[ResponseEvent, None]) -> dict[str, Any]:
    """Raises: BatonError."""
    last: Finished | None = None
    async with aclosing(events):
        async for event in events:
            for _ in _grown(answer, event):
                pass
            last = event if isinstance(event, Finished) else last
    if last is None or last.summary is None:
        raise RuntimeError("an answer ends with Finished")
    return answer.whole(last.choice, last.summary.usage)


def _grown(answer: Answer, event: ResponseEvent) -> Iterator[bytes]:
    match event:
        case Started():
            return answer.begin(event)
        case Delta():
            return answer.grow(event)
        case Finished(choice, summary) if summary is not None:
            return answer.end(choice, summary.usage)
    return iter(())
