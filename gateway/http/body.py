"""Request bodies: read within bounds of size and time."""

import asyncio
from contextlib import ExitStack
from http import HTTPStatus
from typing import Self

from starlette.datastructures import Headers
from starlette.types import Receive

from baton.gateway.http.problem import Problem

_MEGABYTE = 1 << 20
_BUSY_RETRY_S = 1.0


class ClientGone(Exception):
    """The connection ended before the answer did, which can no longer be sent."""


class Body:
    """The bytes read, in the pieces that they came in; they count against the reader's budget until released."""

    def __init__(self, reader: "BodyReader") -> None:
        self._reader = reader
        self.parts: list[bytes] = []
        self.size = 0  # in bytes

    def add(self, part: bytes) -> None:
        self.parts.append(part)
        self.size += len(part)
        self._reader.held_bytes += len(part)

    def release(self) -> None:
        """May be called more than once; only the parsed message remains."""
        self._reader.held_bytes -= self.size
        self.parts, self.size = [], 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class BodyReader:
    """Reads bodies; all that are there at once share one budget of bytes."""

    def __init__(self, max_bytes: int, all_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._all_bytes = all_bytes
        self._timeout_s = timeout_s
        self.held_bytes = 0

    async def read(self, headers: Headers, receive: Receive) -> Body:
        """To be released. Raises: Problem (413, 408, 503), ClientGone."""
        stated = headers.get("content-length", "")
        if stated.isascii() and stated.isdigit() and int(stated) > self._max_bytes:
            raise self._too_large()
        with ExitStack() as unless_whole:
            body = unless_whole.enter_context(Body(self))
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._fill(body, receive)
            except TimeoutError:
                message = f"the body did not arrive within {self._timeout_s:g} s"
                raise Problem(HTTPStatus.REQUEST_TIMEOUT, message, ends_connection=True) from None
            unless_whole.pop_all()
            return body

    async def _fill(self, body: Body, receive: Receive) -> None:
        while True:
            event = await receive()
            if event["type"] == "http.disconnect":
                raise ClientGone
            body.add(event.get("body", b""))
            if body.size > self._max_bytes:
                raise self._too_large()
            if self.held_bytes > self._all_bytes:
                raise _no_memory()
            if not event.get("more_body", False):
                return

    def _too_large(self) -> Problem:
        message = f"the body may have at most {self._max_bytes / _MEGABYTE:g} MiB"
        return Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large", ends_connection=True)


def _no_memory() -> Problem:
    return Problem(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "the memory for request bodies is in use by other requests",
        retry_after_s=_BUSY_RETRY_S,
        ends_connection=True,
    )
