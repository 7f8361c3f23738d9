"""Errors for HTTP clients: a status, and an error object in the format of the client's API (dialect). Pure."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

import grpc

from baton.process.errors import (
    BatonError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    RateLimited,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)

_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.FAILED_PRECONDITION: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    grpc.StatusCode.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    grpc.StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    grpc.StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: HTTPStatus.GATEWAY_TIMEOUT,
}
_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
_ANTHROPIC_TYPES = _TYPES | {
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}
_RETRY_S = 1.0
_CODES = {"PROMPT_TOO_LONG": "context_length_exceeded"}
_BODY_TYPES = frozenset(
    ("", "application/json", "text/json", "text/plain", "application/x-www-form-urlencoded", "application/octet-stream")
)
_INDEX = re.compile(r"\[(\d+)\]")
_ENDS = re.compile(r"(?<=[\w\]])(?=[.\[]|$)")
"""Matches the end of each prefix of a path."""

Renamed = Mapping[str, str]
"""Names that the router's fields have in a body, by beginning of the field's path without `sampling.`.

[] stands for any index.
"""


class Dialect(Enum):
    """API in whose format an error is sent."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"


_PATHS = {"/v1/messages": Dialect.ANTHROPIC, "/api/": Dialect.OLLAMA}


def dialect_of(path: str) -> Dialect:
    """Return the dialect for a path. The path need not exist."""
    return next((dialect for begin, dialect in _PATHS.items() if path.startswith(begin)), Dialect.OPENAI)


class Problem(Exception):
    """Error: the call is answered with this status and message. `param`: path of the invalid field in the body."""

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        allowed: Sequence[str] = (),
        ends_connection: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.allowed = allowed  # methods for the header field Allow
        self.ends_connection = ends_connection  # the connection is closed, since the request was not read to its end
        self.dialect = Dialect.OPENAI

    @property
    def cause(self) -> str:
        """Reason for the counters of ended requests: one of a few lower-case identifiers."""
        if self.status is HTTPStatus.BAD_REQUEST and self.code not in ("invalid_json", "body_too_large"):
            return "invalid_argument"
        return self.code or self.status.name.lower()

    @property
    def content(self) -> dict[str, Any]:
        """Error object in the format of the client's API."""
        return self.content_for(self.dialect)

    def content_for(self, dialect: Dialect) -> dict[str, Any]:
        if dialect is Dialect.OLLAMA:
            return {"error": self.message}
        if dialect is Dialect.ANTHROPIC:
            otherwise = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
            kind = _ANTHROPIC_TYPES.get(self.status, otherwise)
            # Claude Code shortens its conversation when it reads this text.
            too_long = "prompt is too long: " if self.code == _CODES["PROMPT_TOO_LONG"] else ""
            return {"type": "error", "error": {"type": kind, "message": too_long + self.message}}
        otherwise = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        kind = _TYPES.get(self.status, otherwise)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def body(self) -> bytes:
        return json.dumps(self.content, ensure_ascii=False).encode()


def refused(param: str, message: str, code: str | None = None) -> Problem:
    """Return a problem (400) with the field `param`, which the client must change."""
    return Problem(HTTPStatus.BAD_REQUEST, f"{param}: {message}", param, code)


def retry_later(message: str, code: str | None = None, ends_connection: bool = False) -> Problem:
    """Return a problem (503) that asks the client to send the same request again later."""
    status = HTTPStatus.SERVICE_UNAVAILABLE
    return Problem(
        status, f"{message}; retry later", code=code, retry_after_s=_RETRY_S, ends_connection=ends_connection
    )


def check_upgrade(headers: Mapping[str, str]) -> None:
    """Check that the client does not require a WebSocket. Raises: Problem (426), after which clients use HTTP."""
    if "sec-websocket-version" in headers:  # the server has removed the field Upgrade
        raise Problem(
            HTTPStatus.UPGRADE_REQUIRED, "upgrade: WebSocket is not supported; use HTTP", "upgrade", "no_websocket"
        )


def check_method(scope: Mapping[str, Any], *allowed: str) -> None:
    """Check the HTTP method of a request. Raises: Problem (405)."""
    if scope["method"] not in allowed:
        message = f"method {scope['method'][:16]} is not allowed here; use {' or '.join(allowed)}"
        raise Problem(HTTPStatus.METHOD_NOT_ALLOWED, message, code="method_not_allowed", allowed=allowed)


def check_query(scope: Mapping[str, Any], harmless: Collection[str] = ()) -> None:
    """Check the query parameters. Raises: Problem that names the first parameter that is not in `harmless`."""
    for name, _ in parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True):
        if name not in harmless:
            raise refused(name, "unknown query parameter; remove it", "unknown_field")


def check_content(headers: Mapping[str, str]) -> None:
    """Check the headers that describe the body. Raises: Problem (415) if it is compressed or not JSON.

    The media types of forms and plain text are also accepted, since `curl -d` and browsers send JSON with them.
    """
    coding = headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        raise unsupported_media_type("content-encoding", coding, "send the body uncompressed")
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in _BODY_TYPES and not media_type.endswith("+json"):
        raise unsupported_media_type("content-type", media_type, "send application/json")


def unsupported_media_type(field: str, value: str, remedy: str) -> Problem:
    message = f"{field}: {value[:100]} is not supported; {remedy}"
    return Problem(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, field, "unsupported_media_type", ends_connection=True)


def problem_of(error: BatonError, renamed: Renamed) -> Problem:
    """Convert an error to the problem that has the same meaning as the error's gRPC status.

    `renamed`: names of fields in the client's body.
    """
    status = _STATUSES.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)
    match error:
        case InvalidArgument():
            param = _renamed(error.field, renamed)
            code = _CODES.get(error.reason, error.reason.lower()) if error.reason else None
            return Problem(status, f"{param}: {error.description}", param, code)
        case NotFound():
            return Problem(status, error.message, error.resource_type, f"{error.resource_type}_not_found")
        case Unauthenticated():
            return Problem(status, error.message, code="invalid_api_key")  # OpenAI's code, for a missing key, too
        case PermissionDenied():
            return Problem(status, error.message, code=error.reason.lower())
        case RateLimited():
            return Problem(status, error.message, code="rate_limit_exceeded", retry_after_s=error.retry_after_s)
        case ResourceExhausted():
            return Problem(status, error.message, code="no_room", retry_after_s=error.retry_after_s)
        case Unavailable():
            leaves = error.reason == "DRAINING"  # a new connection reaches another router, if routers share the port
            code = error.reason.lower()
            return Problem(status, error.message, code=code, retry_after_s=error.retry_after_s, ends_connection=leaves)
    return Problem(status, error.message)


def _renamed(field: str, renamed: Renamed) -> str:
    """Replace the path's longest prefix in `renamed` by its new name, in which indices of the path replace []."""
    path = field.removeprefix("sampling.")
    for end in sorted((match.end() for match in _ENDS.finditer(path)), reverse=True):
        begin, rest = path[:end], path[end:]
        if begin in renamed:
            return renamed[begin] + rest
        if (named := renamed.get(_INDEX.sub("[]", begin))) is not None:
            for index in _INDEX.findall(begin):
                named = named.replace("[]", f"[{index}]", 1)
            return named + rest
    return path
