"""Reading of request bodies within limits, and sending of replies, non-streaming or streamed.

The HTTP status of a stream is sent with its first chunk, so an error before the first chunk is sent as the status. If a
client disconnects, or reads nothing of its answer for too long, its request is cancelled.
"""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Self

from starlette.datastructures import Headers
from starlette.types import Receive, Send

from baton.router.http.edge.problem import Problem, retry_later
from baton.router.trace.record import CallReader, Leave

_MEGABYTE = 1 << 20
_SHORT_PART_BYTES = 1024
Fields = Mapping[str, str]


class ClientGone(Exception):
    """Error: the client disconnected before its answer was complete."""


class RequestBody:
    """Received parts of one body. They count towards the reader's memory limit until they are released."""

    def __init__(self, reader: "BodyReader") -> None:
        self._reader = reader
        self.parts: list[bytes] = []
        self.size = 0  # sum of the parts' bytes

    def add(self, part: bytes) -> None:
        if self.parts and len(self.parts[-1]) < _SHORT_PART_BYTES:
            self.parts[-1] += part  # joined, since single bytes as parts would take 50 times the memory
        else:
            self.parts.append(part)
        self.size += len(part)
        self._reader.held_bytes += len(part)

    def release(self) -> None:
        """Free the body's memory. Further calls do nothing."""
        self._reader.held_bytes -= self.size
        self.parts, self.size = [], 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class BodyReader:
    """Reader of request bodies. A body has at most `max_bytes`, all bodies together at most `all_bytes`."""

    def __init__(self, max_bytes: int, all_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._all_bytes = all_bytes
        self._timeout_s = timeout_s
        self.held_bytes = 0

    async def read(self, headers: Headers, receive: Receive) -> RequestBody:
        """Receive a body, which the caller must release. Raises: Problem (413, 408, 503), ClientGone."""
        stated = headers.get("content-length", "")
        if stated.isascii() and stated.isdigit() and int(stated) > self._max_bytes:
            raise self._too_large()
        with ExitStack() as unless_whole:
            body = unless_whole.enter_context(RequestBody(self))
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._fill(body, receive)
            except TimeoutError:
                message = f"the body did not arrive within {self._timeout_s:g} s (--http-body-s)"
                raise Problem(HTTPStatus.REQUEST_TIMEOUT, message, ends_connection=True) from None
            unless_whole.pop_all()
            return body

    async def _fill(self, body: RequestBody, receive: Receive) -> None:
        while True:
            event = await receive()
            if event["type"] == "http.disconnect":
                raise ClientGone
            body.add(event.get("body", b""))
            if body.size > self._max_bytes:
                raise self._too_large()
            if self.held_bytes > self._all_bytes:
                message = "the memory for request bodies is in use by other requests (--http-all-bodies of the router)"
                raise retry_later(message, ends_connection=True)
            if not event.get("more_body", False):
                return

    def _too_large(self) -> Problem:
        message = f"the body exceeds {self._max_bytes / _MEGABYTE:g} MiB (--http-max-body of the router); send less"
        return Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large", ends_connection=True)


EVENT_STREAM = "text/event-stream; charset=utf-8"
JSON = "application/json"
DONE = b"data: [DONE]\n\n"
_LINGER_S = 2.0


@dataclass(frozen=True, slots=True)
class FullReply:
    body: bytes = b""
    status: HTTPStatus = HTTPStatus.OK
    media_type: str = JSON
    headers: Fields = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StreamedReply:
    """Streamed reply. `chunks` may only raise before the first chunk: a later failure is sent as a chunk."""

    chunks: AsyncGenerator[bytes, None]
    media_type: str = EVENT_STREAM


Reply = FullReply | StreamedReply


class Stalled(Exception):
    """Error: the client read nothing of its answer for too long. The message says for how long."""


def json_reply(content: Any, status: HTTPStatus = HTTPStatus.OK) -> FullReply:
    return FullReply(json.dumps(content, ensure_ascii=False).encode(), status)


def problem_reply(problem: Problem) -> FullReply:
    headers: dict[str, str] = {}
    if problem.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(problem.retry_after_s)))
    if problem.status is HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    if problem.allowed:
        headers["allow"] = ", ".join(problem.allowed)
    if problem.ends_connection:
        headers["connection"] = "close"
    return FullReply(problem.body, problem.status, headers=headers)


async def send_reply(reply: Reply, send: Send, headers: Fields, reader: CallReader | None = None) -> None:
    """Send the reply. `reader`: state of the call, used only for a stream. Raises: Stalled.

    An exception from the first chunk of a stream is raised before anything is sent.
    """
    if isinstance(reply, FullReply):
        await _send_full(reply, send, headers)
        return
    async with aclosing(reply.chunks) as chunks:
        first = await anext(chunks)
        shaped = {**headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
        try:
            await send(_head(HTTPStatus.OK, reply.media_type, shaped))
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Stalled:
            if reader is not None:
                reader.leaves = Leave.STALLED
            raise
    await send({"type": "http.response.body", "body": b""})


async def _send_full(reply: FullReply, send: Send, headers: Fields, more_body: bool = False) -> None:
    sized = {**headers, **reply.headers, "content-length": str(len(reply.body))}
    await send(_head(reply.status, reply.media_type, sized))
    await send({"type": "http.response.body", "body": reply.body, "more_body": more_body})


async def refuse(problem: Problem, receive: Receive, send: Send, headers: Fields) -> None:
    """Send an error. If the body was not read, it is read and dropped for up to 2 s: closing a connection with unread
    bytes would lose the error.
    """
    await _send_full(problem_reply(problem), send, headers, more_body=True)
    if problem.ends_connection and problem.status is not HTTPStatus.REQUEST_TIMEOUT:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while (await receive()).get("more_body", False):
                    continue
    await send({"type": "http.response.body", "body": b""})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Await `work`, and cancel it if the client disconnects. Call it after the body is received. Raises: ClientGone."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        working.result()
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def _head(status: HTTPStatus, media_type: str, headers: Fields) -> dict[str, Any]:
    given = {"content-type": media_type, **headers} if media_type else headers
    return {
        "type": "http.response.start",
        "status": int(status),
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in given.items()],
    }
