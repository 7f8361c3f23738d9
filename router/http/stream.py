"""Streaming of answers: one loop for all APIs, and an interface of writers that convert events to bytes."""

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
    """Event of one of a call's prompts. `place`: index of the prompt."""

    place: int
    event: ResponseEvent


Events = AsyncGenerator[ResponseEvent | PromptEvent, None] | AsyncGenerator[ResponseEvent, None]


class AnswerWriter(ABC):
    """Interface of a writer of one streamed answer, in the format of an API."""

    @abstractmethod
    def write(self, event: ResponseEvent | PromptEvent) -> bytes:
        """Return the bytes to send for an event; may be empty."""

    @abstractmethod
    def failed(self, problem: Problem) -> bytes:
        """Return the bytes that end a stream with an error, after other bytes were sent."""

    async def end(self) -> bytes:
        """Return the bytes that end a complete stream; may be empty."""
        return b""


async def stream(writer: AnswerWriter, events: Events, renamed: Renamed) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of an answer. `renamed`: names of fields in the client's body, for errors.

    Raises: BatonError before the first bytes; later errors are sent in the stream.
    """
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
    """Writer of an answer with one choice. A parser splits its text into reasoning, text and tool calls."""

    def __init__(self, parser: OutputParser) -> None:
        self.model = self.version = ""
        self._parser = parser
        self._ended: tuple[ChoiceFinished, Summary] | None = None

    @property
    def ended(self) -> tuple[ChoiceFinished, Summary]:
        """Finish reason and summary of the complete answer."""
        if self._ended is None:
            raise RuntimeError("the events of an answer lack Finished with a summary")
        return self._ended

    @abstractmethod
    def complete(self) -> dict[str, Any]:
        """Return the complete answer as one object. Call it after the last event."""

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
        """Yield the bytes that precede the first piece of the answer."""
        yield from ()

    @abstractmethod
    def _add(self, pieces: Sequence[OutputPiece], delta: Delta | None) -> Iterator[bytes]:
        """Add the next pieces of the answer, and yield their bytes. `delta`: their tokens; None at the end."""

    @abstractmethod
    def _finish(self, end: ChoiceFinished, summary: Summary) -> Iterator[bytes]:
        """Yield the bytes that follow the last piece of the answer."""

    async def reply(
        self, events: Events, is_streamed: bool | None, renamed: Renamed, media_type: str = EVENT_STREAM
    ) -> Reply:
        """Return the reply: a stream, or one object once the answer is complete. Raises: BatonError."""
        if is_streamed:
            return StreamedReply(stream(self, events, renamed), media_type)
        async with aclosing(events):
            async for event in events:
                self.write(event)
        await self.end()
        return json_reply(self.complete())


def encoded_event(kind: str, **content: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **content}, ensure_ascii=False)}\n\n".encode()
