"""Answers in Ollama's format: one JSON object, or in a stream one line of JSON for each part."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.router.http.answers import REASONS, TokenTexts, rfc3339_now
from baton.router.http.edge.exchange import FullReply
from baton.router.http.edge.problem import Dialect, Problem
from baton.router.http.stream import PieceWriter
from baton.router.public.vectors import Vectors
from baton.router.types.response import ChoiceFinished, Delta, Summary
from baton.text.output.pieces import CallArguments, CallStart, OutputPiece, Thought
from baton.text.output.thoughts import OutputParser
from baton.text.output.tool_calls import arguments_object

JSON_LINES = "application/x-ndjson"
_NS_PER_MS = 1e6


@dataclass(slots=True)
class AnswerPart:
    """Part of an answer, or the complete answer."""

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
"""Function that converts a part into the fields that an API's answer has for it."""


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
    """Return the answer to a request without messages or prompt, which only asks whether the model is loaded."""
    return {"model": model, "created_at": rfc3339_now(), **shape(AnswerPart()), "done": True, "done_reason": "load"}


def embedded(made: Vectors, took_s: float) -> FullReply:
    """Return the answer with vectors. `load_duration` is 0, since the time is not measured by stage."""
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


class OllamaWriter(PieceWriter):
    """Writer of an answer in Ollama's format. A stream has a line for each event, and a last one with durations."""

    def __init__(self, shape: PartFormat, parser: OutputParser, texts: TokenTexts | None) -> None:
        """Create the writer. `shape`: fields of a part. `texts`: texts of tokens; None: no log-probabilities."""
        super().__init__(parser)
        self._shape = shape
        self._texts = texts
        self._call: _Call | None = None  # incomplete tool call, sent when its arguments are complete
        self._calls = 0
        self._all = AnswerPart()

    def complete(self) -> dict[str, Any]:
        return self._last(self._all)

    def failed(self, problem: Problem) -> bytes:
        return _line(problem.content_for(Dialect.OLLAMA))

    def _add(self, pieces: Sequence[OutputPiece], delta: Delta | None) -> Iterator[bytes]:
        part = self._part(pieces)
        if delta is None:
            part.calls += self._ended_call()
        elif self._texts is not None:
            part.logprobs = self._texts.chat(delta.token_ids, delta.logprobs)["content"]
        self._all.add(part)
        if part:
            yield _line(self._shown(part))

    def _finish(self, end: ChoiceFinished, summary: Summary) -> Iterator[bytes]:
        yield _line(self._last(AnswerPart()))

    def _shown(self, part: AnswerPart) -> dict[str, Any]:
        named = {"model": self.model, "system_fingerprint": self.version}
        return {**named, "created_at": rfc3339_now(), **self._shape(part), "done": False}

    def _last(self, part: AnswerPart) -> dict[str, Any]:
        end, summary = self.ended
        return {**self._shown(part), "done": True, "done_reason": REASONS[end.reason], **_measured(summary)}

    def _part(self, pieces: Sequence[OutputPiece]) -> AnswerPart:
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


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode() + b"\n"


def _measured(summary: Summary) -> dict[str, int]:
    """Return counts and durations. The durations of loading, prompt and answer add up to the total; the model is always
    loaded, so `load_duration` is the time in the queues.
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
