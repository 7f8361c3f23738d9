"""POST /v1/completions. Each prompt of a call becomes a request. All requests of a call share one answer or stream."""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from baton.process.errors import InvalidArgument
from baton.router.dispatcher import Dispatcher
from baton.router.http.answers import (
    REASONS,
    ChunkWriter,
    Collected,
    CollectedChoice,
    TokenTexts,
    collect,
    created_now,
    stop_reason,
    usage_json,
    usage_sum,
)
from baton.router.http.edge.exchange import Reply, StreamedReply, json_reply
from baton.router.http.messages import CompletionRequest
from baton.router.http.requests import HttpCall, completion_requests, names_of
from baton.router.http.stream import PromptEvent, stream
from baton.router.trace.record import CallReader, Leave
from baton.router.types.request import GenerationRequest
from baton.router.types.response import AnswerId, Delta, Finished, PromptPart, ResponseEvent, Started, one_version

_AHEAD = 64  # maximum number of events buffered here; each request's own buffer holds more

Answer = Callable[[GenerationRequest], AsyncGenerator[ResponseEvent, None]]
_PROMPT = re.compile(r"(text|token_ids(\.ids)?)\b")


def by_place(error: Exception, place: int, prompts: int) -> Exception:
    """Return the error with the index of its prompt in the field's name, if the call has several prompts."""
    if prompts > 1 and isinstance(error, InvalidArgument) and (found := _PROMPT.match(error.field)):
        field = f"prompts[{place}]{error.field[found.end() :]}"
        return InvalidArgument(field, error.description, error.reason, error.metadata)
    return error


async def collect_all(requests: Sequence[GenerationRequest], answer: Answer, reader: CallReader) -> list[Collected]:
    """Collect the answers, in order of the requests. The first failure cancels the others. Raises: BatonError."""

    async def one(place: int, request: GenerationRequest) -> Collected:
        try:
            return await collect(answer(request))
        except InvalidArgument as error:
            raise by_place(error, place, len(requests)) from error

    tasks = [asyncio.ensure_future(one(place, request)) for place, request in enumerate(requests)]
    try:
        return list(await asyncio.gather(*tasks))
    except Exception:  # not CancelledError, which means that the client disconnected
        reader.leaves = Leave.SIBLING
        raise
    finally:
        await _end(tasks)


async def merged(
    requests: Sequence[GenerationRequest], answer: Answer, reader: CallReader
) -> AsyncGenerator[PromptEvent, None]:
    """Yield the events of all requests as they occur. The first failure cancels the others. Raises: BatonError."""
    queue: asyncio.Queue[PromptEvent | Exception | None] = asyncio.Queue(_AHEAD)

    async def follow(place: int, request: GenerationRequest) -> None:
        try:
            async with aclosing(answer(request)) as events:
                async for event in events:
                    await queue.put(PromptEvent(place, event))
        except Exception as error:  # noqa: BLE001 (the reader of the queue raises it)
            await queue.put(by_place(error, place, len(requests)))
        else:
            await queue.put(None)

    tasks = [asyncio.ensure_future(follow(place, request)) for place, request in enumerate(requests)]
    try:
        running = len(tasks)
        while running:
            match await queue.get():
                case PromptEvent() as numbered:
                    yield numbered
                case None:
                    running -= 1
                case Exception() as error:
                    reader.leaves = Leave.SIBLING
                    raise error
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def answer_completion(dispatcher: Dispatcher, message: CompletionRequest, call: HttpCall) -> Reply:
    """Answer a completion request. Raises: Problem, BatonError."""
    requests = completion_requests(message, call)
    texts = TokenTexts((await dispatcher.choose(message.model or "")).served.tokenizer.token_bytes)
    stream_id = f"{AnswerId.COMPLETION}{requests[0].request_id}"
    answer = partial(dispatcher.answer, time_left_s=None, parent=call.trace, reader=call.reader)
    if message.stream:
        # In the usual case of a single request, no tasks and no queue are needed.
        events = answer(requests[0]) if len(requests) == 1 else merged(requests, answer, call.reader)
        return StreamedReply(stream(CompletionWriter(message, stream_id, texts), events, names_of(message)))
    whole = await collect_all(requests, answer, call.reader)
    return json_reply(_response(message, stream_id, whole, texts))


def _response(message: CompletionRequest, stream_id: str, whole: list[Collected], texts: TokenTexts) -> dict[str, Any]:
    choices = [_choice(message, each, choice, texts) for each in whole for choice in each.choices]
    return {
        "id": stream_id,
        "object": "text_completion",
        "created": created_now(),
        "model": whole[0].started.model,
        "system_fingerprint": one_version(each.started.version for each in whole),
        "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
        "usage": usage_json(usage_sum(each.usage for each in whole)),
    }


def _choice(message: CompletionRequest, whole: Collected, choice: CollectedChoice, texts: TokenTexts) -> dict[str, Any]:
    prompt_text = "".join(part.text for part in whole.prompt)
    logprobs = None
    if message.logprobs is not None:
        shown = whole.prompt if message.echo else []
        prompt_ids = [token_id for part in shown for token_id in part.token_ids]
        scores = [score for part in shown for score in part.logprobs or [None] * len(part.token_ids)]
        logprobs = texts.completion([*prompt_ids, *choice.token_ids], [*scores, *choice.logprobs], 0)
    content: dict[str, Any] = {
        "text": prompt_text + choice.text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": stop_reason(choice.end, message.stop_token_ids),
    }
    if message.return_token_ids:
        content |= {"token_ids": choice.token_ids, "prompt_token_ids": list(whole.started.prompt_token_ids)}
    if message.prompt_logprobs is not None:
        content["prompt_logprobs"] = texts.prompt(whole.prompt)
    return content


class CompletionWriter(ChunkWriter):
    kind = "text_completion"
    plain = ('{"index":%d,"text":', ',"logprobs":null,"finish_reason":null}')

    def __init__(self, message: CompletionRequest, stream_id: str, texts: TokenTexts) -> None:
        detailed = message.logprobs is not None or bool(message.return_token_ids)
        super().__init__(stream_id, message.n, message.stream_options, detailed)
        self._message = message
        self._texts = texts
        self._sent_characters: dict[int, int] = {}  # by choice, for `text_offset`
        self._prompts: dict[int, tuple[int, ...]] = {}

    def _started(self, place: int, started: Started) -> Iterator[bytes]:
        self._prompts[place] = started.prompt_token_ids
        yield from ()

    def _delta(self, place: int, delta: Delta) -> Iterator[bytes]:
        index = place * self.n + delta.index
        choice: dict[str, Any] = {"index": index, "text": delta.text, "logprobs": None, "finish_reason": None}
        if self._message.logprobs is not None:
            choice["logprobs"] = self._logprobs(index, delta.token_ids, list(delta.logprobs))
        if self._message.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
            if delta.offset == 0:
                choice["prompt_token_ids"] = list(self._prompts[place])
        yield self.choice(choice)

    def _part(self, place: int, part: PromptPart) -> Iterator[bytes]:
        """Yield a chunk with a part of the echoed prompt for every choice of that prompt."""
        for index in range(place * self.n, (place + 1) * self.n):
            logprobs = None
            if self._message.logprobs is not None:
                scores = part.logprobs or [None] * len(part.token_ids)
                logprobs = self._logprobs(index, part.token_ids, list(scores))
            if part.text or logprobs is not None:
                yield self.choice({"index": index, "text": part.text, "logprobs": logprobs, "finish_reason": None})

    def _finished(self, place: int, finished: Finished) -> Iterator[bytes]:
        end = finished.choice
        yield self.choice(
            {
                "index": place * self.n + end.index,
                "text": "",
                "logprobs": None,
                "finish_reason": REASONS[end.reason],
                "stop_reason": stop_reason(end, self._message.stop_token_ids),
            }
        )

    def _logprobs(self, index: int, token_ids: tuple[int, ...], scores: list[Any]) -> dict[str, Any]:
        logprobs = self._texts.completion(token_ids, scores, self._sent_characters.get(index, 0))
        self._sent_characters[index] = self._sent_characters.get(index, 0) + sum(map(len, logprobs["tokens"]))
        return logprobs
