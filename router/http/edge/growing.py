"""Answer that grows by pieces, for protocols with typed server-sent events (Anthropic, OpenAI Responses)."""

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from baton.process.errors import BatonError
from baton.router.types.response import ChoiceFinished, Delta, Finished, ResponseEvent, Started, Usage
from baton.text.output.pieces import OutputPiece
from baton.text.output.thoughts import OutputParser


class GrowingAnswer(ABC):
    """An answer: `stream` yields the events of its growth, `collect` returns the finished object."""

    def __init__(self, parser: OutputParser) -> None:
        self.model = self.version = ""
        self._parser = parser

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Return the finished answer."""

    @abstractmethod
    def _begin(self, started: Started) -> Iterator[bytes]: ...

    @abstractmethod
    def _add(self, piece: OutputPiece) -> Iterator[bytes]: ...

    @abstractmethod
    def _end(self, end: ChoiceFinished, usage: Usage) -> Iterator[bytes]:
        """Yield the events after the last piece."""

    @abstractmethod
    def _failed(self, error: BatonError) -> bytes: ...

    async def _complete(self) -> bytes:
        """Return the final event, if any, once the answer may be announced as complete."""
        return b""

    async def stream(self, events: AsyncGenerator[ResponseEvent, None]) -> AsyncGenerator[bytes, None]:
        """Yield the events; an error after the first one becomes an event. Raises: BatonError before that."""
        begun = False
        try:
            async with aclosing(events):
                async for event in events:
                    if chunk := b"".join(self._grow(event)):
                        begun = True
                        yield chunk
                    has_ended = isinstance(event, Finished) and event.summary is not None
                    if has_ended and (last := await self._complete()):
                        yield last
        except BatonError as error:
            if not begun:
                raise
            yield self._failed(error)

    async def collect(self, events: AsyncGenerator[ResponseEvent, None]) -> dict[str, Any]:
        """Return the finished answer. Raises: BatonError."""
        async with aclosing(events):
            async for event in events:
                for _ in self._grow(event):
                    pass
        await self._complete()
        return self.whole()

    def _grow(self, event: ResponseEvent) -> Iterator[bytes]:
        match event:
            case Started():
                self.model, self.version = event.model, event.version
                yield from self._begin(event)
            case Delta():
                for piece in self._parser.push(event.text, len(event.token_ids)):
                    yield from self._add(piece)
            case Finished(choice, summary) if summary is not None:
                for piece in self._parser.finish():
                    yield from self._add(piece)
                yield from self._end(choice, summary.usage)


def encoded_event(kind: str, **content: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **content}, ensure_ascii=False)}\n\n".encode()
