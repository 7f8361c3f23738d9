"""A chat's answer as chunks: the role, then texts and parts of function calls, then why it ended."""

import json
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from gateway.collected import REASONS, stop_reason
from gateway.messages.chat import ChatRequest
from gateway.reply import DONE
from gateway.sse import ChunkWriter, UsageSoFar
from gateway.token_texts import TokenTexts
from gateway.tool_calls import CallBegins, CallGoesOn, Piece, ToolParser
from gateway.tool_choice import ToolUse
from router.answer import Delta
from router.response import Finished, ResponseEvent, Started

_KIND = "chat.completion.chunk"
_PLAIN_END = '},"logprobs":null,"finish_reason":null}'


class ChatStream:
    """One request's chunks, of all its choices."""

    def __init__(self, message: ChatRequest, stream_id: str, texts: TokenTexts, tools: ToolUse) -> None:
        self._message = message
        self._id = stream_id
        self._texts = texts
        self._n = message.n or 1
        self._usage = UsageSoFar.of(message.stream_options)
        parser = tools.parser
        self._parsers: dict[int, ToolParser] = {i: parser() for i in range(self._n)} if parser is not None else {}
        self._detailed = bool(message.logprobs or message.return_token_ids)

    async def chunks(self, events: AsyncGenerator[ResponseEvent, None]) -> AsyncGenerator[bytes, None]:
        """Raises: BatonError."""
        writer: ChunkWriter | None = None
        usage = self._usage
        plain = not self._detailed and not self._parsers
        heads = [f'{{"index":{index},"delta":{{"content":' for index in range(self._n)]
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Started):
                    usage.prompt_tokens[0] = event.prompt_tokens
                    writer = ChunkWriter(self._id, _KIND, int(time.time()), event.model, usage)
                    yield b"".join(self._roles(writer, event))
                    continue
                if writer is None:
                    raise RuntimeError("a stream begins with Started")
                if isinstance(event, Delta):
                    usage.completion_tokens += len(event.token_ids)
                    if plain:
                        if event.text:
                            yield writer.plain(heads[event.index], event.text, _PLAIN_END)
                    elif chunks := b"".join(self._parts(writer, event)):
                        yield chunks
                elif isinstance(event, Finished):
                    if event.summary is not None:
                        usage.final[0] = event.summary.usage
                    yield b"".join(self._finish(writer, event))
        if writer is not None and usage.in_the_end:
            yield writer.usage()
        yield DONE

    def _roles(self, writer: ChunkWriter, started: Started) -> Iterator[bytes]:
        extra = ""
        if self._message.return_token_ids:
            extra = f',"prompt_token_ids":{json.dumps(started.prompt_token_ids)}'
        for index in range(self._n):
            yield writer.choice(
                f'{{"index":{index},"delta":{{"role":"assistant","content":""{_PLAIN_END}', "" if index else extra
            )

    def _parts(self, writer: ChunkWriter, delta: Delta) -> Iterator[bytes]:
        """Log-probabilities and token ids go with the first part, or by themselves where there is none."""
        details: dict[str, Any] = {}
        if self._message.logprobs:
            details["logprobs"] = self._texts.chat(delta.token_ids, delta.logprobs)
        if self._message.return_token_ids:
            details["token_ids"] = list(delta.token_ids)
        parser = self._parsers.get(delta.index)
        pieces = parser.push(delta.text) if parser is not None else [delta.text] if delta.text else []
        if not pieces and details and delta.token_ids:
            pieces = [""]
        for piece in pieces:
            yield self._part(writer, delta.index, _delta(piece), details)
            details = {}

    def _finish(self, writer: ChunkWriter, finished: Finished) -> Iterator[bytes]:
        end = finished.choice
        parser = self._parsers.get(end.index)
        for piece in parser.finish() if parser is not None else ():
            yield self._part(writer, end.index, _delta(piece), {})
        reason = REASONS[end.reason]
        called = parser is not None and parser.calls > 0 and reason == "stop"
        stopped_by = stop_reason(end, self._message.stop_token_ids)
        ends = {"finish_reason": "tool_calls" if called else reason, "stop_reason": stopped_by}
        yield self._part(writer, end.index, {}, ends)

    def _part(self, writer: ChunkWriter, index: int, delta: dict[str, Any], details: dict[str, Any]) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **details}
        return writer.choice(json.dumps(choice, ensure_ascii=False))


def _delta(piece: Piece) -> dict[str, Any]:
    match piece:
        case str():
            return {"content": piece}
        case CallBegins(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallGoesOn(index, arguments):
            return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}
