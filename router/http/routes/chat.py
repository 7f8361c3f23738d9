"""POST /v1/chat/completions: answers as one object or a stream of chunks, with a parser for reasoning and calls."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from baton.router.dispatcher import Dispatcher
from baton.router.http.answers import (
    REASONS,
    ChunkWriter,
    CollectedChoice,
    TokenTexts,
    collect,
    created_now,
    stop_reason,
    usage_json,
)
from baton.router.http.edge.exchange import Reply, StreamedReply, json_reply
from baton.router.http.messages import ChatRequest
from baton.router.http.requests import HttpCall, chat_request, names_of
from baton.router.http.stream import stream
from baton.router.types.response import AnswerId, Delta, Finished, Started
from baton.text.output.pieces import CallArguments, CallStart, OutputPiece, Thought
from baton.text.output.thoughts import MakeParser, OutputParser


class ChatWriter(ChunkWriter):
    """Writer of a chat's stream. A choice has chunks with its role, its text and calls, and its finish reason."""

    kind = "chat.completion.chunk"
    plain = ('{"index":%d,"delta":{"content":', '},"logprobs":null,"finish_reason":null}')

    def __init__(self, message: ChatRequest, stream_id: str, texts: TokenTexts, parser: MakeParser | None) -> None:
        detailed = bool(message.logprobs or message.return_token_ids or parser is not None)
        super().__init__(stream_id, message.n, message.stream_options, detailed)
        self._message = message
        self._texts = texts
        self._parsers: dict[int, OutputParser] = {i: parser() for i in range(self.n)} if parser is not None else {}

    def _started(self, place: int, started: Started) -> Iterator[bytes]:
        extra = ""
        if self._message.return_token_ids:
            extra = f',"prompt_token_ids":{json.dumps(started.prompt_token_ids)}'
        for index in range(self.n):
            yield self._chunk(index, {"role": "assistant", "content": ""}, {}, "" if index else extra)

    def _delta(self, place: int, delta: Delta) -> Iterator[bytes]:
        """Yield chunks for new tokens. The first chunk, if need be one without text, has log-probabilities and ids."""
        details: dict[str, Any] = {}
        if self._message.logprobs:
            details["logprobs"] = self._texts.chat(delta.token_ids, delta.logprobs)
        if self._message.return_token_ids:
            details["token_ids"] = list(delta.token_ids)
        parser = self._parsers.get(delta.index)
        pieces: list[OutputPiece] = [delta.text] if delta.text else []
        if parser is not None:
            pieces = parser.push(delta.text, len(delta.token_ids))
            self._usage.thought_tokens = _thought_tokens(self._parsers.values())
        if not pieces and details and delta.token_ids:
            pieces = [""]
        for piece in pieces:
            yield self._chunk(delta.index, _delta(piece), details)
            details = {}

    def _finished(self, place: int, finished: Finished) -> Iterator[bytes]:
        end = finished.choice
        parser = self._parsers.get(end.index)
        for piece in parser.finish() if parser is not None else ():
            yield self._chunk(end.index, _delta(piece), {})
        reason = REASONS[end.reason]
        called = parser is not None and parser.calls > 0 and reason == "stop"
        stopped_by = stop_reason(end, self._message.stop_token_ids)
        ends = {"finish_reason": "tool_calls" if called else reason, "stop_reason": stopped_by}
        yield self._chunk(end.index, {}, ends)

    def _chunk(self, index: int, delta: Mapping[str, Any], details: Mapping[str, Any], extra: str = "") -> bytes:
        return self.choice({"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **details}, extra)


def _thought_tokens(parsers: Iterable[OutputParser]) -> int | None:
    counts = [parser.thought_tokens for parser in parsers if parser.thinks]
    return sum(counts) if counts else None


def _delta(piece: OutputPiece) -> dict[str, Any]:
    match piece:
        case Thought(text):
            return {"reasoning_content": text}
        case str():
            return {"content": piece}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, arguments):
            return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}


async def answer_chat(dispatcher: Dispatcher, message: ChatRequest, call: HttpCall) -> Reply:
    """Answer a chat request. Raises: Problem, BatonError."""
    tokenizer = (await dispatcher.choose(message.model or "")).served.tokenizer
    chat = await chat_request(message, call, tokenizer)
    request = chat.request
    events = dispatcher.answer(request, None, call.trace, reader=call.reader)
    stream_id, texts = f"{AnswerId.CHAT}{request.request_id}", TokenTexts(tokenizer.token_bytes)
    if message.stream:
        writer = ChatWriter(message, stream_id, texts, chat.parser)
        return StreamedReply(stream(writer, events, names_of(message)))
    whole = await collect(events)
    parsers = [chat.reader() for _ in whole.choices]
    choices = [
        {"index": index, **_choice(message, choice, texts, parsers[index])}
        for index, choice in enumerate(whole.choices)
    ]
    response = {
        "id": stream_id,
        "object": "chat.completion",
        "created": created_now(),
        "model": whole.started.model,
        "system_fingerprint": whole.started.version,
        "choices": choices,
        "usage": usage_json(whole.usage, _thought_tokens(parsers)),
    }
    if message.return_token_ids:
        response["prompt_token_ids"] = list(whole.started.prompt_token_ids)
    if message.prompt_logprobs is not None:
        response["prompt_logprobs"] = texts.prompt(whole.prompt)
    return json_reply(response)


def _choice(message: ChatRequest, choice: CollectedChoice, texts: TokenTexts, parser: OutputParser) -> dict[str, Any]:
    answer = whole_message(zip(choice.texts, choice.tokens, strict=True), parser)
    content: dict[str, Any] = {
        "message": answer,
        "logprobs": texts.chat(choice.token_ids, choice.logprobs) if message.logprobs else None,
        "finish_reason": ended_by(answer, choice.finish_reason),
        "stop_reason": stop_reason(choice.end, message.stop_token_ids),
    }
    if message.return_token_ids:
        content["token_ids"] = choice.token_ids
    return content


def ended_by(message: Mapping[str, Any], reason: str | None) -> str | None:
    """Return the finish reason of a complete message: `tool_calls` instead of `stop` if it has calls."""
    return "tool_calls" if "tool_calls" in message and reason == "stop" else reason


def whole_message(texts: Iterable[tuple[str, int]], parser: OutputParser) -> dict[str, Any]:
    """Assemble a choice's complete message. `texts`: pieces of text with their numbers of tokens."""
    content, thoughts, calls = "", "", list[dict[str, Any]]()
    pieces = [piece for text, tokens in texts for piece in parser.push(text, tokens)]
    for piece in (*pieces, *parser.finish()):
        match piece:
            case CallStart(call_id=call_id, name=name):
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}})
            case CallArguments(index=index, arguments=arguments):
                calls[index]["function"]["arguments"] += arguments
            case Thought(text):
                thoughts += text
            case str():
                content += piece
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if thoughts:
        message["reasoning_content"] = thoughts
    return message if not calls else {**message, "content": content or None, "tool_calls": calls}
