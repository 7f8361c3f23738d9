"""From a gRPC status to the error that a caller gets: the one mapping, for sync and async alike."""

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from client.errors import (
    BatonClientError,
    Busy,
    Cancelled,
    DeadlineExceeded,
    ErrorDetails,
    InvalidRequest,
    ModelNotFound,
    NotAllowed,
    ServerError,
    Unavailable,
)

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
"""Every other code is a ServerError."""

STOPPED = (grpc.StatusCode.CANCELLED, "CANCELLED")
"""gRPC's own status of calls that a stopping server drops; calls that are cancelled here have another message."""

Metadata = Iterable[tuple[str, str | bytes]]


def error_from_status(code: grpc.StatusCode, message: str | None, trailing: Metadata) -> BatonClientError:
    text, details = message or code.name, read_details(trailing)
    if (code, message) == STOPPED:
        return Unavailable("the server stopped", details)
    kind = ERRORS.get(code)
    return ServerError(text, details, code) if kind is None else kind(text, details)


def read_details(trailing: Metadata) -> ErrorDetails:
    """Reads the details; those that do not parse are left out, since the code alone already shows what happened."""
    found: dict[str, Any] = {}
    for key, value in trailing:
        if key == DETAILS_KEY and isinstance(value, bytes):
            status = status_pb2.Status()
            if _parses(status, value):
                for packed in status.details:
                    found |= _read_detail(packed.type_url.rpartition("/")[2], packed.value)
    return ErrorDetails(**found)


def _read_detail(name: str, value: bytes) -> dict[str, Any]:
    """Fields of ErrorDetails that one google.rpc message fills."""
    match name:
        case "google.rpc.BadRequest":
            bad = error_details_pb2.BadRequest()
            if _parses(bad, value) and bad.field_violations:
                return {"field": bad.field_violations[0].field}
        case "google.rpc.ResourceInfo":
            resource = error_details_pb2.ResourceInfo()
            if _parses(resource, value):
                return {"resource": resource.resource_name}
        case "google.rpc.RetryInfo":
            retry = error_details_pb2.RetryInfo()
            if _parses(retry, value):
                return {"retry_after_s": retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9}
        case "google.rpc.ErrorInfo":
            info = error_details_pb2.ErrorInfo()
            if _parses(info, value):
                return {"reason": info.reason, "metadata": dict(info.metadata)}
        case "google.rpc.RequestInfo":
            request = error_details_pb2.RequestInfo()
            if _parses(request, value):
                return {"request_id": request.request_id}
    return {}


def _parses(message: Message, data: bytes) -> bool:
    try:
        message.ParseFromString(data)
    except DecodeError:
        return False
    return True
