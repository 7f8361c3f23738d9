"""Streams of answers: one loop, and a writer for each dialect that turns the router's events into bytes."""

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from baton.process.errors import BatonError
from baton.router.http.edge.exchange import EVENT_STREAM, Reply, StreamedReply, json_reply
from baton.router.http.edge.problem import Problem, Renamed, problem_of
from baton.router.types.response import ChoiceFinished, Delta, Finished, ResponseEvent, Started, Summary
from baton.text.output.pieces import OutputPiece
from baton.text.output.thoughts import OutputParser


class PromptEvent(NamedTuple):
    """Event of one of several prompts. `place`: index of the prompt."""

    place: int
    event: ResponseEvent


Events = AsyncGenerator[ResponseEvent | PromptEvent, None] | AsyncGenerator[ResponseEvent, None]


class AnswerWriter(ABC):
    """Writer of one streamed answer."""

    @abstractmethod
    def write(self, event: ResponseEvent | PromptEvent) -> bytes:
        """Return the bytes of an event, possibly none."""

    @abstractmethod
    def failed(self, problem: Problem) -> bytes:
        """Return the end of a stream whose answer failed after the first bytes."""

    async def end(self) -> bytes:
        """Return the end of a complete stream, possibly no bytes."""
        return b""


async def stream(writer: AnswerWriter, events: Events, renamed: Renamed) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of an answer. `renamed`: names of fields in errors. Raises: BatonError before the first bytes."""
    begun = False
    try:
        async with aclosing(events):
            async for event in events:
                if chunk := writer.write(event):
                    begun = True
                    yield chunk
    except BatonError as error:
        if not begun:
            raise
        yield writer.failed(problem_of(error, renamed))
        return
    if last := await writer.end():
        yield last


class PieceWriter(AnswerWriter):
    """Writer of an answer of one choice, which a parser splits into reasoning, text and calls."""

    def __init__(self, parser: OutputParser) -> None:
        self.model = self.version = ""
        self._parser = parser
        self._ended: tuple[ChoiceFinished, Summary] | None = None

    @property
    def ended(self) -> tuple[ChoiceFinished, Summary]:
        """Reason and summary of the finished answer."""
        if self._ended is None:
            raise RuntimeError("an answer ends with Finished")
        return self._ended

    @abstractmethod
    def complete(self) -> dict[str, Any]:
        """Return the answer as one object, once it has finished."""

    def write(self, event: ResponseEvent | PromptEvent) -> bytes:
        return b"".join(self._written(event))

    def _written(self, event: ResponseEvent | PromptEvent) -> Iterator[bytes]:
        match event:
            case Started():
                self.model, self.version = event.model, event.version
                yield from self._begin(event)
            case Delta():
                yield from self._add(self._parser.push(event.text, len(event.token_ids)), event)
            case Finished(choice, summary) if summary is not None:
                yield from self._add(self._parser.finish(), None)
                self._ended = choice, summary
                yield from self._finish(choice, summary)

    def _begin(self, started: Started) -> Iterator[bytes]:
        """Yield what precedes the first piece."""
        yield from ()

    @abstractmethod
    def _add(self, pieces: Sequence[OutputPiece], delta: Delta | None) -> Iterator[bytes]:
        """Yield the next pieces. `delta`: tokens that completed them; None at the end of the answer."""

    @abstractmethod
    def _finish(self, end: ChoiceFinished, summary: Summary) -> Iterator[bytes]:
        """Yield what follows the last piece."""

    async def reply(
        self, events: Events, is_streamed: bool | None, renamed: Renamed, media_type: str = EVENT_STREAM
    ) -> Reply:
        """Return the answer, streamed or as one object. Raises: BatonError."""
        if is_streamed:
            return StreamedReply(stream(self, events, renamed), media_type)
        async with aclosing(events):
            async for event in events:
                self.write(event)
        await self.end()
        return json_reply(self.complete())


def encoded_event(kind: str, **content: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **content}, ensure_ascii=False)}\n\n".encode()
