"""POST /v1/completions. Several prompts are several requests answered as one."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from baton.gateway.answers import (
    REASONS,
    Choice,
    ChunkWriter,
    Collected,
    TokenTexts,
    UsageSoFar,
    collect,
    stop_reason,
    usage_json,
    with_problem_event,
)
from baton.gateway.http.exchange import DONE, Reply, Streamed, json_reply
from baton.gateway.http.problem import Renamed
from baton.gateway.messages import CompletionRequest
from baton.gateway.requests import Call, completion_requests
from baton.router.dispatcher import Dispatcher
from baton.router.trace.record import Leave, Reader
from baton.router.types.request import GenerationRequest
from baton.router.types.response import AnswerId, Delta, Finished, PromptPart, ResponseEvent, Started, Usage

_AHEAD = 64  # events that wait for a client; more of them wait in the router, which has a bound of its own

Answer = Callable[[GenerationRequest], AsyncGenerator[ResponseEvent, None]]


class Numbered(NamedTuple):
    """An event of the `place`-th request."""

    place: int
    event: ResponseEvent


async def collect_all(requests: Sequence[GenerationRequest], answer: Answer, reader: Reader) -> list[Collected]:
    """In the order of the requests; the first failure ends the others. Raises: BatonError."""
    tasks = [asyncio.ensure_future(collect(answer(request))) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    except Exception:
        reader.leaves = Leave.SIBLING
        raise
    finally:
        await _end(tasks)


async def merged(
    requests: Sequence[GenerationRequest], answer: Answer, reader: Reader
) -> AsyncGenerator[Numbered, None]:
    """Events as they come; the first failure ends the others. Raises: BatonError."""
    if len(requests) == 1:  # nearly always, and without a task and a queue in between
        async with aclosing(answer(requests[0])) as events:
            async for event in events:
                yield Numbered(0, event)
        return
    queue: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue(_AHEAD)

    async def follow(place: int, request: GenerationRequest) -> None:
        try:
            async with aclosing(answer(request)) as events:
                async for event in events:
                    await queue.put(Numbered(place, event))
        except Exception as error:  # noqa: BLE001 (the reader of the queue raises it)
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.ensure_future(follow(place, request)) for place, request in enumerate(requests)]
    try:
        running = len(tasks)
        while running:
            match await queue.get():
                case Numbered() as numbered:
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


RENAMED: Renamed = {"text": "prompt", "token_ids": "prompt", "session": "session_id"}


class Completions:
    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def answer(self, message: CompletionRequest, call: Call) -> Reply:
        """Raises: Problem, BatonError."""
        requests = completion_requests(message, call)
        texts = TokenTexts((await self._dispatcher.choose(message.model or "")).served.tokenizer.token_bytes)
        stream_id = f"{AnswerId.COMPLETION}{requests[0].request_id}"

        def answer(request: GenerationRequest) -> AsyncGenerator[ResponseEvent, None]:
            return self._dispatcher.answer(request, None, call.trace, reader=call.reader)

        if message.stream:
            stream = _Stream(message, stream_id, texts)
            return Streamed(with_problem_event(stream.chunks(merged(requests, answer, call.reader)), RENAMED))
        whole = await collect_all(requests, answer, call.reader)
        return json_reply(_response(message, stream_id, whole, texts))


def _response(message: CompletionRequest, stream_id: str, whole: list[Collected], texts: TokenTexts) -> dict[str, Any]:
    choices = [_choice(message, each, choice, texts) for each in whole for choice in each.choices]
    usage = Usage(
        sum(each.usage.prompt_tokens for each in whole),
        sum(each.usage.completion_tokens for each in whole),
        sum(each.usage.cached_tokens for each in whole),
    )
    return {
        "id": stream_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": whole[0].model,
        "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
        "usage": usage_json(usage),
    }


def _choice(message: CompletionRequest, whole: Collected, choice: Choice, texts: TokenTexts) -> dict[str, Any]:
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
        content |= {"token_ids": choice.token_ids, "prompt_token_ids": list(whole.prompt_token_ids)}
    if message.prompt_logprobs is not None:
        content["prompt_logprobs"] = texts.prompt(whole.prompt)
    return content


class _Stream:
    """The chunks of one answer, to all prompts. Choice `c` of prompt `p` has the index p x n + c."""

    def __init__(self, message: CompletionRequest, stream_id: str, texts: TokenTexts) -> None:
        self._message = message
        self._id = stream_id
        self._texts = texts
        self._n = message.n or 1
        self._usage = UsageSoFar.of(message.stream_options)
        self._sent_characters: dict[int, int] = {}  # by choice, where log-probabilities need offsets
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._detailed = message.logprobs is not None or bool(message.return_token_ids)

    async def chunks(self, events: AsyncGenerator[Numbered, None]) -> AsyncGenerator[bytes, None]:
        """Raises: BatonError."""
        writer: ChunkWriter | None = None
        heads: dict[int, str] = {}
        usage = self._usage
        async with aclosing(events):
            async for place, event in events:
                if isinstance(event, Started):
                    usage.prompt_tokens[place] = event.prompt_tokens
                    self._prompts[place] = event.prompt_token_ids
                    writer = writer or ChunkWriter(self._id, "text_completion", int(time.time()), event.model, usage)
                    continue
                if writer is None:
                    raise RuntimeError("a stream begins with Started")
                if isinstance(event, Delta):
                    index = place * self._n + event.index
                    usage.completion_tokens += len(event.token_ids)
                    if self._detailed:
                        yield writer.choice(json.dumps(self._delta(place, index, event), ensure_ascii=False))
                    elif event.text:
                        head = heads.get(index) or heads.setdefault(index, f'{{"index":{index},"text":')
                        yield writer.plain(head, event.text, ',"logprobs":null,"finish_reason":null}')
                elif isinstance(event, Finished):
                    if event.summary is not None:
                        usage.final[place] = event.summary.usage
                    yield writer.choice(json.dumps(self._finish(place, event)))
                else:
                    for choice in self._echo(place, event):
                        yield writer.choice(json.dumps(choice, ensure_ascii=False))
        if writer is not None and usage.in_the_end:
            yield writer.usage()
        yield DONE

    def _delta(self, place: int, index: int, delta: Delta) -> Mapping[str, Any]:
        choice: dict[str, Any] = {"index": index, "text": delta.text, "logprobs": None, "finish_reason": None}
        if self._message.logprobs is not None:
            choice["logprobs"] = self._logprobs(index, delta.token_ids, list(delta.logprobs))
        if self._message.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
            if delta.offset == 0:
                choice["prompt_token_ids"] = list(self._prompts[place])
        return choice

    def _echo(self, place: int, part: PromptPart) -> list[dict[str, Any]]:
        """The prompt stands before every choice."""
        choices = []
        for index in range(place * self._n, (place + 1) * self._n):
            scores = part.logprobs or [None] * len(part.token_ids)
            logprobs = None
            if self._message.logprobs is not None:
                logprobs = self._logprobs(index, part.token_ids, list(scores))
            if part.text or logprobs is not None:
                choices.append({"index": index, "text": part.text, "logprobs": logprobs, "finish_reason": None})
        return choices

    def _logprobs(self, index: int, token_ids: tuple[int, ...], scores: list[Any]) -> dict[str, Any]:
        logprobs = self._texts.completion(token_ids, scores, self._sent_characters.get(index, 0))
        self._sent_characters[index] = self._sent_characters.get(index, 0) + sum(map(len, logprobs["tokens"]))
        return logprobs

    def _finish(self, place: int, finished: Finished) -> dict[str, Any]:
        end = finished.choice
        return {
            "index": place * self._n + end.index,
            "text": "",
            "logprobs": None,
            "finish_reason": REASONS[end.reason],
            "stop_reason": stop_reason(end, self._message.stop_token_ids),
        }
