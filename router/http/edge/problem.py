"""The reply to an HTTP client when a request fails: a status, and the error object that its clients read. Pure."""

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
_ANTHROPIC_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
_CODES = {"PROMPT_TOO_LONG": "context_length_exceeded"}
_BODY_TYPES = frozenset(
    ("", "application/json", "text/json", "text/plain", "application/x-www-form-urlencoded", "application/octet-stream")
)
_INDEX = re.compile(r"\[(\d+)\]")
_ENDS = re.compile(r"(?<=[\w\]])(?=[.\[]|$)")
"""Of the beginnings of a path."""

Renamed = Mapping[str, str]
"""The names of our fields in a message: by the beginning of a path, after `sampling.`. An index is [] or itself."""


class Dialect(Enum):
    """Whose clients read the error."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"


_PATHS = {"/v1/messages": Dialect.ANTHROPIC, "/api/": Dialect.OLLAMA}


def dialect_of(path: str) -> Dialect:
    """By whose path it is; there need be nothing at it."""
    return next((dialect for begin, dialect in _PATHS.items() if path.startswith(begin)), Dialect.OPENAI)


class Problem(Exception):
    """An answer that is an error. `param` is the path of the offending field in the body."""

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
        self.allowed = allowed  # methods
        self.ends_connection = ends_connection  # there is more of the request, which will not be read
        self.dialect = Dialect.OPENAI

    @property
    def cause(self) -> str:
        """For counters: one lower-case word out of few."""
        if self.status is HTTPStatus.BAD_REQUEST and self.code not in ("invalid_json", "body_too_large"):
            return "invalid_argument"
        return self.code or self.status.name.lower()

    @property
    def content(self) -> dict[str, Any]:
        """As its client reads it."""
        return self.content_for(self.dialect)

    def content_for(self, dialect: Dialect) -> dict[str, Any]:
        if dialect is Dialect.OLLAMA:
            return {"error": self.message}
        if dialect is Dialect.ANTHROPIC:
            otherwise = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
            kind = _ANTHROPIC_TYPES.get(self.status, otherwise)
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        otherwise = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        kind = _TYPES.get(self.status, otherwise)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def body(self) -> bytes:
        return json.dumps(self.content, ensure_ascii=False).encode()


def refused(param: str, message: str, code: str | None = None) -> Problem:
    """The client must change this field."""
    return Problem(HTTPStatus.BAD_REQUEST, f"{param}: {message}", param, code)


def check_method(scope: Mapping[str, Any], *allowed: str) -> None:
    """Raises: Problem (405) for a request of another method."""
    if scope["method"] not in allowed:
        message = f"{scope['method'][:16]} is not served here, but {' and '.join(allowed)}"
        raise Problem(HTTPStatus.METHOD_NOT_ALLOWED, message, code="method_not_allowed", allowed=allowed)


def check_query(scope: Mapping[str, Any], harmless: Collection[str] = ()) -> None:
    """Raises: Problem that names the first parameter: no route has any, though some clients add a `harmless` one."""
    for name, _ in parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True):
        if name not in harmless:
            raise refused(name, "unknown query parameter; this route has none", "unknown_field")


def check_content(headers: Mapping[str, str]) -> None:
    """Raises: Problem (415) for a body that is compressed, or is no JSON by its type. `curl -d` says that it is a form,
    browsers that it is plain text.
    """
    coding = headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        raise _unread("content-encoding", coding, "send the body as it is")
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in _BODY_TYPES and not media_type.endswith("+json"):
        raise _unread("content-type", media_type, "send application/json")


def _unread(field: str, value: str, remedy: str) -> Problem:
    message = f"{field}: {value[:100]} is not read here; {remedy}"
    return Problem(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, field, "unsupported_media_type", ends_connection=True)


def problem_of(error: BatonError, renamed: Renamed) -> Problem:
    """The same error as over gRPC."""
    status = _STATUSES.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)
    match error:
        case InvalidArgument():
            param = _renamed(error.field, renamed)
            code = _CODES.get(error.reason, error.reason.lower()) if error.reason else None
            return Problem(status, f"{param}: {error.description}", param, code)
        case NotFound():
            return Problem(status, error.message, error.resource_type, f"{error.resource_type}_not_found")
        case Unauthenticated():
            return Problem(status, error.message, code="invalid_api_key")  # OpenAI's code for none at all, too
        case PermissionDenied():
            return Problem(status, error.message, code=error.reason.lower())
        case RateLimited():
            return Problem(status, error.message, code="rate_limit_exceeded", retry_after_s=error.retry_after_s)
        case ResourceExhausted():
            return Problem(status, error.message, code="no_room", retry_after_s=error.retry_after_s)
        case Unavailable():
            return Problem(status, error.message, code=error.reason.lower(), retry_after_s=error.retry_after_s)
    return Problem(status, error.message)


def _renamed(field: str, renamed: Renamed) -> str:
    """By the longest beginning that has a name, with its own indices where that is said of any index."""
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
