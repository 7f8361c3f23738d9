"""Request bodies: read within bounds of size and time, and parsed into messages that name what is wrong with them."""

import asyncio
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.datastructures import Headers
from starlette.types import Receive

from gateway.json_size import json_size
from gateway.problem import Problem

Message = TypeVar("Message", bound=BaseModel)

_MEGABYTE = 1 << 20
_BUSY_RETRY_S = 1.0


class ClientGone(Exception):
    """The connection ended before the answer did; there is nobody to tell."""


class BodyReader:
    """Reads bodies; all that are being read at once share one budget of bytes."""

    def __init__(self, max_bytes: int, all_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._all_bytes = all_bytes
        self._timeout_s = timeout_s
        self.held_bytes = 0

    async def read(self, headers: Headers, receive: Receive) -> bytes:
        """Raises: Problem (413, 408, 503), ClientGone."""
        stated = headers.get("content-length", "")
        if stated.isascii() and stated.isdigit() and int(stated) > self._max_bytes:
            raise self._too_large()
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    event = await receive()
                    if event["type"] == "http.disconnect":
                        raise ClientGone
                    chunk = event.get("body", b"")
                    size += len(chunk)
                    self.held_bytes += len(chunk)
                    chunks.append(chunk)
                    if size > self._max_bytes:
                        raise self._too_large()
                    if self.held_bytes > self._all_bytes:
                        raise _no_memory()
                    if not event.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            message = f"the body did not come in within {self._timeout_s:g} s"
            raise Problem(HTTPStatus.REQUEST_TIMEOUT, message, ends_connection=True) from None
        finally:
            self.held_bytes -= size

    def _too_large(self) -> Problem:
        message = f"the body may have at most {self._max_bytes / _MEGABYTE:g} MiB"
        return Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large", ends_connection=True)


def _no_memory() -> Problem:
    return Problem(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "the bodies of other requests fill the memory that is set apart for them",
        retry_after_s=_BUSY_RETRY_S,
        ends_connection=True,
    )


def parse(message_type: type[Message], body: bytes) -> Message:
    """Raises: Problem that names the first field that is wrong."""
    if (excess := json_size(body).excess) is not None:
        raise Problem(HTTPStatus.BAD_REQUEST, f"the body has {excess}", code="body_too_large")
    try:
        return message_type.model_validate_json(body)
    except ValidationError as error:
        # What was sent is left out: it may be a prompt.
        errors = error.errors(include_url=False, include_context=False, include_input=False)
    if errors[0]["type"] == "json_invalid":
        raise Problem(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {errors[0]['msg']}", code="invalid_json")
    sent = from_json(body)
    # Of the members of a union, the one that came furthest is probably what was meant.
    path, told = max(((_path(each, sent), each) for each in errors), key=lambda found: found[0].progress)
    message = f"{path.text}: {told['msg']}" if path.text else told["msg"]
    raise Problem(HTTPStatus.BAD_REQUEST, message, path.text or None, str(told["type"]))


class _Path(NamedTuple):
    """`messages[0].role`; `progress` grows with depth, and with the place in a list."""

    text: str
    progress: tuple[int, ...]


def _path(error: ErrorDetails, value: Any) -> _Path:
    """Where pydantic found the error, without the names that it gives to the members of a union."""
    path = ""
    progress: tuple[int, ...] = ()
    location = error["loc"]
    for number, step in enumerate(location, 1):
        if isinstance(step, int) and isinstance(value, list) and step < len(value):
            path, value, progress = f"{path}[{step}]", value[step], (*progress, step)
        elif isinstance(step, str) and isinstance(value, dict) and step in value:
            path, value, progress = f"{path}.{step}", value[step], (*progress, 0)
        elif isinstance(step, str) and error["type"] == "missing" and number == len(location):
            path, progress = f"{path}.{step}", (*progress, 0)
    return _Path(path.removeprefix("."), progress)
