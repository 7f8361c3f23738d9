"""Errors that a caller sees, and the one mapping from gRPC statuses to them.

BatonClientError
├── InvalidRequest      the request can never succeed; names the field
├── ModelNotFound       the server does not serve the model
├── NotAllowed          missing, unknown or insufficient API key
├── Busy                overloaded or over a limit; with the time to retry
├── Unavailable         no server answers, no worker is available, or the router stopped
├── DeadlineExceeded    timeout_s or the server's own limit passed
├── Cancelled           the server, or closing the client, cancelled the call
└── ServerError         fault of the server
    └── ProtocolError   the server broke the protocol: a gap in the answer, or an end without Finished
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

Metadata = Iterable[tuple[str, str | bytes]]


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorDetails:
    """Details of an error besides code and message; None if the server sent none."""

    field: str | None = None  # path of the offending field
    resource: str | None = None  # name of the missing resource
    retry_after_s: float | None = None
    reason: str | None = None  # constant, for example "PROMPT_TOO_LONG"
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)  # details of the error, such as the limit
    request_id: str | None = None


NO_DETAILS = ErrorDetails()


class BatonClientError(Exception):
    """Base of all errors. `code`: gRPC status of the call; if no call was made, the closest status."""

    code = grpc.StatusCode.UNKNOWN

    def __init__(self, message: str, details: ErrorDetails = NO_DETAILS) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    @property
    def reason(self) -> str | None:
        return self.details.reason


class InvalidRequest(BatonClientError):
    code = grpc.StatusCode.INVALID_ARGUMENT

    @property
    def field(self) -> str | None:
        """Return the path of the wrong field, for example "sampling.temperature"."""
        return self.details.field


class ModelNotFound(BatonClientError):
    code = grpc.StatusCode.NOT_FOUND

    @property
    def name(self) -> str | None:
        return self.details.resource


class NotAllowed(BatonClientError):
    """Missing, unknown or insufficient API key. `reason` is MISSING_API_KEY, INVALID_API_KEY or NOT_ADMIN."""

    code = grpc.StatusCode.UNAUTHENTICATED


class _Retryable(BatonClientError):
    @property
    def retry_after_s(self) -> float | None:
        """Return the seconds that the server asks to wait before a retry; None if it names no time."""
        return self.details.retry_after_s


class Busy(_Retryable):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(_Retryable):
    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(BatonClientError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(BatonClientError):
    code = grpc.StatusCode.CANCELLED


class ServerError(BatonClientError):
    def __init__(
        self, message: str, details: ErrorDetails = NO_DETAILS, code: grpc.StatusCode = grpc.StatusCode.INTERNAL
    ) -> None:
        super().__init__(message, details)
        self.code = code

    @property
    def request_id(self) -> str | None:
        """Return the id under which the server logs the request; None if the server sent none."""
        return self.details.request_id


class ProtocolError(ServerError):
    def __init__(self, message: str) -> None:
        super().__init__(message, code=grpc.StatusCode.DATA_LOSS)


DETAILS_KEY = "grpc-status-details-bin"
ERRORS: dict[grpc.StatusCode, type[BatonClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.UNAUTHENTICATED: NotAllowed,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Busy,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
}
"""Error by status. Every other code is a ServerError."""

STOPPED = (grpc.StatusCode.CANCELLED, "CANCELLED")
"""Status of calls that a stopping server drops. Calls cancelled by the client have another message."""


def error_from_status(code: grpc.StatusCode, message: str | None, trailing: Metadata) -> BatonClientError:
    text, details = message or code.name, read_details(trailing)
    if (code, message) == STOPPED:
        return Unavailable("the server stopped", details)
    kind = ERRORS.get(code)
    return ServerError(text, details, code) if kind is None else kind(text, details)


def read_details(trailing: Metadata) -> ErrorDetails:
    """Return the details of a gRPC error. Details that do not parse are ignored, since the status code suffices."""
    found: dict[str, Any] = {}
    for key, value in trailing:
        if key == DETAILS_KEY and isinstance(value, bytes):
            status = status_pb2.Status()
            if _parses(status, value):
                for packed in status.details:
                    found |= _read_detail(packed.type_url.rpartition("/")[2], packed.value)
    return ErrorDetails(**found)


def _read_detail(name: str, value: bytes) -> dict[str, Any]:
    """Return the fields of ErrorDetails in one google.rpc message."""
    kind, read = _DETAILS.get(name, (None, None))
    message = kind() if kind is not None else None
    return read(message) if read is not None and message is not None and _parses(message, value) else {}


def _violated(bad: Any) -> dict[str, Any]:
    return {"field": bad.field_violations[0].field} if bad.field_violations else {}


_DETAILS: dict[str, tuple[type[Message], Callable[[Any], dict[str, Any]]]] = {
    "google.rpc.BadRequest": (error_details_pb2.BadRequest, _violated),
    "google.rpc.ResourceInfo": (error_details_pb2.ResourceInfo, lambda found: {"resource": found.resource_name}),
    "google.rpc.RetryInfo": (
        error_details_pb2.RetryInfo,
        lambda found: {"retry_after_s": found.retry_delay.seconds + found.retry_delay.nanos / 1e9},
    ),
    "google.rpc.ErrorInfo": (
        error_details_pb2.ErrorInfo,
        lambda found: {"reason": found.reason, "metadata": dict(found.metadata)},
    ),
    "google.rpc.RequestInfo": (error_details_pb2.RequestInfo, lambda found: {"request_id": found.request_id}),
}


def _parses(message: Message, data: bytes) -> bool:
    try:
        message.ParseFromString(data)
    except DecodeError:
        return False
    return True
