"""Answers in Ollama's format: one object, or a line of JSON per part."""

import json
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from baton.process.errors import BatonError
from baton.router.http.answers import REASONS, TokenTexts, rfc3339_now
from baton.router.http.edge.exchange import FullReply
from baton.router.http.edge.problem import Dialect, Problem, Renamed, problem_of
from baton.router.public.vectors import Vectors
from baton.router.types.response import Delta, Finished, ResponseEvent, Started, Summary
from baton.text.output.pieces import CallArguments, CallStart, OutputPiece, Thought
from baton.text.output.thoughts import OutputParser
from baton.text.output.tool_calls import arguments_object

JSON_LINES = "application/x-ndjson"
_NS_PER_MS = 1e6


@dataclass(slots=True)
class AnswerPart:
    """A part of an answer, or a complete answer."""

    text: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.thinking or self.calls or self.logprobs)

    def add(self, other: "AnswerPart") -> None:
        self.text += other.text
        self.thinking += other.thinking
        self.calls += other.calls
        self.logprobs += other.logprobs


PartFormat = Callable[[AnswerPart], dict[str, Any]]
"""Conversion of a part into fields of the answer."""


def in_chat(part: AnswerPart) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": part.text}
    message |= {"thinking": part.thinking} if part.thinking else {}
    message |= {"tool_calls": part.calls} if part.calls else {}
    return {"message": message, **_logprobs(part)}


def in_generate(part: AnswerPart) -> dict[str, Any]:
    return {"response": part.text, **({"thinking": part.thinking} if part.thinking else {}), **_logprobs(part)}


def _logprobs(part: AnswerPart) -> dict[str, Any]:
    return {"logprobs": part.logprobs} if part.logprobs else {}


def loaded(model: str, shape: PartFormat) -> dict[str, Any]:
    """Return the answer to a request that only asks for the model to be loaded."""
    return {"model": model, "created_at": rfc3339_now(), **shape(AnswerPart()), "done": True, "done_reason": "load"}


def embedded(made: Vectors, took_s: float) -> FullReply:
    """Return the answer with vectors; `load_duration` is 0, since their time is not split."""
    body = {
        "model": made.model,
        "system_fingerprint": made.version,
        "embeddings": made.numbers,
        "total_duration": _ns(took_s * 1e3),
        "load_duration": 0,
        "prompt_eval_count": made.usage.prompt_tokens,
    }
    return FullReply(json.dumps(body, ensure_ascii=False).encode())


@dataclass(slots=True)
class _Call:
    call_id: str
    name: str
    arguments: str = ""


class OllamaAnswer:
    """Converter of one request's events."""

    def __init__(self, shape: PartFormat, parser: OutputParser, texts: TokenTexts | None) -> None:
        """Create the converter. `texts`: texts of tokens, if log-probabilities were asked for."""
        self._shape = shape
        self._parser = parser
        self._texts = texts
        self._call: _Call | None = None  # incomplete call: its arguments become an object when complete
        self._calls = 0
        self._model = self._version = ""

    def begin(self, started: Started) -> None:
        self._model, self._version = started.model, started.version

    def part(self, delta: Delta) -> AnswerPart:
        part = self._told(self._parser.push(delta.text, len(delta.token_ids)))
        if self._texts is not None:
            part.logprobs = self._texts.chat(delta.token_ids, delta.logprobs)["content"]
        return part

    def rest(self) -> AnswerPart:
        """Return the text that was held back until the end of the answer."""
        part = self._told(self._parser.finish())
        part.calls += self._ended_call()
        return part

    def line(self, part: AnswerPart) -> dict[str, Any]:
        named = {"model": self._model, "system_fingerprint": self._version}
        return {**named, "created_at": rfc3339_now(), **self._shape(part), "done": False}

    def last(self, part: AnswerPart, end: Finished, summary: Summary) -> dict[str, Any]:
        return {**self.line(part), "done": True, "done_reason": REASONS[end.choice.reason], **_measured(summary)}

    def _told(self, pieces: Iterable[OutputPiece]) -> AnswerPart:
        part = AnswerPart()
        for piece in pieces:
            if isinstance(piece, CallArguments) and self._call is not None:
                self._call.arguments += piece.arguments
                continue
            part.calls += self._ended_call()
            match piece:
                case CallStart(call_id=call_id, name=name):
                    self._call = _Call(call_id, name)
                case Thought(text):
                    part.thinking += text
                case str():
                    part.text += piece
        return part

    def _ended_call(self) -> Iterator[dict[str, Any]]:
        call, self._call = self._call, None
        if call is not None:
            function = {"index": self._calls, "name": call.name, "arguments": arguments_object(call.arguments)}
            self._calls += 1
            yield {"id": call.call_id, "function": function}


def _measured(summary: Summary) -> dict[str, int]:
    """Return counts and durations. Loading, prompt and answer add up to the total; loading stands for the time in the
    queue.
    """
    stages, usage = summary.timings.stages, summary.usage
    waited_ms = min(stages.ttft_ms, stages.router_queue_ms + stages.route_ms + stages.prefill_queue_ms)
    return {
        "total_duration": _ns(stages.total_ms),
        "load_duration": _ns(waited_ms),
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": _ns(stages.ttft_ms - waited_ms),
        "eval_count": usage.completion_tokens,
        "eval_duration": _ns(stages.total_ms - stages.ttft_ms),
    }


def _ns(duration_ms: float) -> int:
    return round(duration_ms * _NS_PER_MS)


async def stream(
    answer: OllamaAnswer, events: AsyncGenerator[ResponseEvent, None], renamed: Renamed
) -> AsyncGenerator[bytes, None]:
    """Yield the lines; an error after the first one becomes a line. Raises: BatonError before that."""
    begun = False
    try:
        async with aclosing(events):
            async for event in events:
                lines = _lines(answer, event)
                if lines:
                    begun = True
                    yield b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines)
    except BatonError as error:
        if not begun:
            raise
        problem: Problem = problem_of(error, renamed)
        yield json.dumps(problem.content_for(Dialect.OLLAMA), ensure_ascii=False).encode() + b"\n"


def _lines(answer: OllamaAnswer, event: ResponseEvent) -> Sequence[dict[str, Any]]:
    match event:
        case Started():
            answer.begin(event)
        case Delta() if part := answer.part(event):
            return [answer.line(part)]
        case Finished(summary=summary) if summary is not None:
            rest = answer.rest()
            return [*([answer.line(rest)] if rest else []), answer.last(AnswerPart(), event, summary)]
    return []


async def whole(answer: OllamaAnswer, events: AsyncGenerator[ResponseEvent, None]) -> dict[str, Any]:
    """Return the complete answer. Raises: BatonError."""
    all_of_it = AnswerPart()
    async with aclosing(events):
        async for event in events:
            match event:
                case Started():
                    answer.begin(event)
                case Delta():
                    all_of_it.add(answer.part(event))
                case Finished(summary=summary) if summary is not None:
                    all_of_it.add(answer.rest())
                    return answer.last(all_of_it, event, summary)
    raise RuntimeError("an answer ends with Finished")
