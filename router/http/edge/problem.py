"""Errors for HTTP clients: a status and an error object in the client's dialect. Pure."""

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
"""Names of the router's fields in a message, by prefix of the path after `sampling.`. [] stands for any index."""


class Dialect(Enum):
    """API whose clients read the error."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"


_PATHS = {"/v1/messages": Dialect.ANTHROPIC, "/api/": Dialect.OLLAMA}


def dialect_of(path: str) -> Dialect:
    """Return the dialect of a path, whether it exists or not."""
    return next((dialect for begin, dialect in _PATHS.items() if path.startswith(begin)), Dialect.OPENAI)


class Problem(Exception):
    """An error as an answer. `param`: path of the invalid field in the body."""

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
        self.allowed = allowed  # methods for the header Allow
        self.ends_connection = ends_connection  # the rest of the request is not read
        self.dialect = Dialect.OPENAI

    @property
    def cause(self) -> str:
        """Reason for counters: one of a few lower-case words."""
        if self.status is HTTPStatus.BAD_REQUEST and self.code not in ("invalid_json", "body_too_large"):
            return "invalid_argument"
        return self.code or self.status.name.lower()

    @property
    def content(self) -> dict[str, Any]:
        """Error object in the client's dialect."""
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
    """Return a problem that asks the client to change this field."""
    return Problem(HTTPStatus.BAD_REQUEST, f"{param}: {message}", param, code)


def retry_later(message: str, code: str | None = None, ends_connection: bool = False) -> Problem:
    """Return a problem that asks the client to send the same request again."""
    status = HTTPStatus.SERVICE_UNAVAILABLE
    return Problem(
        status, f"{message}; retry later", code=code, retry_after_s=_RETRY_S, ends_connection=ends_connection
    )


def check_method(scope: Mapping[str, Any], *allowed: str) -> None:
    """Check the method. Raises: Problem (405)."""
    if scope["method"] not in allowed:
        message = f"method {scope['method'][:16]} is not allowed here; use {' or '.join(allowed)}"
        raise Problem(HTTPStatus.METHOD_NOT_ALLOWED, message, code="method_not_allowed", allowed=allowed)


def check_query(scope: Mapping[str, Any], harmless: Collection[str] = ()) -> None:
    """Check the query parameters. Raises: Problem that names the first one that is not `harmless`."""
    for name, _ in parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True):
        if name not in harmless:
            raise refused(name, "unknown query parameter; this route has none", "unknown_field")


def check_content(headers: Mapping[str, str]) -> None:
    """Check the type of the body. Raises: Problem (415) if it is compressed or not JSON.

    Types of forms and plain text are accepted too: `curl -d` and browsers send JSON with them.
    """
    coding = headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        raise _unsupported("content-encoding", coding, "send the body uncompressed")
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in _BODY_TYPES and not media_type.endswith("+json"):
        raise _unsupported("content-type", media_type, "send application/json")


def _unsupported(field: str, value: str, remedy: str) -> Problem:
    message = f"{field}: {value[:100]} is not supported; {remedy}"
    return Problem(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, field, "unsupported_media_type", ends_connection=True)


def problem_of(error: BatonError, renamed: Renamed) -> Problem:
    """Return the problem of an error, with the same meaning as over gRPC."""
    status = _STATUSES.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)
    match error:
        case InvalidArgument():
            param = _renamed(error.field, renamed)
            code = _CODES.get(error.reason, error.reason.lower()) if error.reason else None
            return Problem(status, f"{param}: {error.description}", param, code)
        case NotFound():
            return Problem(status, error.message, error.resource_type, f"{error.resource_type}_not_found")
        case Unauthenticated():
            return Problem(status, error.message, code="invalid_api_key")  # OpenAI uses this code for a missing key too
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
    """Rename the longest prefix that has a name; [] in the name is replaced by the field's own indices."""
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
