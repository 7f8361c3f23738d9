"""Errors that callers receive: each has a gRPC status and google.rpc details. Independent of requests and servers.

BatonError
├── InvalidArgument     INVALID_ARGUMENT    BadRequest (+ ErrorInfo)   the caller must change the request
├── FailedPrecondition  FAILED_PRECONDITION PreconditionFailure        caller and server, or their states, do not match
├── Unauthenticated     UNAUTHENTICATED     ErrorInfo                  no API key, or an unknown one
├── PermissionDenied    PERMISSION_DENIED   ErrorInfo                  the key does not allow the call
├── NotFound            NOT_FOUND           ResourceInfo               no such model
├── ResourceExhausted   RESOURCE_EXHAUSTED  RetryInfo                  no capacity; nothing was computed
│   └── RateLimited     RESOURCE_EXHAUSTED  ErrorInfo, RetryInfo       the API key has used up its limit
├── Unavailable         UNAVAILABLE         ErrorInfo, RetryInfo       no worker, worker lost, or draining
├── Aborted             ABORTED             ErrorInfo                  another stream of the same request continues
├── DeadlineExceeded    DEADLINE_EXCEEDED   -                          the deadline passed
└── Internal            INTERNAL            ErrorInfo, RequestInfo     a fault of Baton
"""

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

ERROR_DOMAIN = "baton"
"""Domain of every ErrorInfo; together with `reason` it identifies a cause in every version and language."""


class BatonError(Exception):
    """Error with a gRPC status; `details` builds its google.rpc messages."""

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN
    reason: str | None = None  # one upper-case word; if set, an ErrorInfo is sent
    metadata: Mapping[str, str] = {}  # metadata of the ErrorInfo
    retry_after_s: float | None = None  # if set, a RetryInfo is sent

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @property
    def cause(self) -> str:
        """Return the cause for counters: one lower-case word of a small set."""
        return (self.reason or self.code.name).lower()

    @property
    def log_text(self) -> str:
        """Return the message for logs, without parts of prompts and answers."""
        return self.message

    @property
    def details(self) -> tuple[Message, ...]:
        details = [] if self.reason is None else [_error_info(self.reason, self.metadata)]
        return (*details, *([] if self.retry_after_s is None else [_retry_info(self.retry_after_s)]))


class InvalidArgument(BatonError):
    """Error: a field of the request is invalid. `field`: path of the field, for example `sampling.top_p`."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(
        self, field: str, description: str, reason: str | None = None, metadata: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description
        self.reason = reason
        self.metadata = dict(metadata or {})

    @property
    def log_text(self) -> str:
        """Return the message for logs: the field alone, since the description may quote the client's input."""
        return self.field if self.reason is None else f"{self.field}: {self.reason}"

    @property
    def details(self) -> tuple[Message, ...]:
        violation = _rpc().BadRequest.FieldViolation(field=self.field, description=self.description)
        return (_rpc().BadRequest(field_violations=[violation]), *super().details)


class FailedPrecondition(BatonError):
    """Error: caller and server, or their states, do not match. `field`: the condition that must change for the call to
    succeed.
    """

    code = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description

    @property
    def details(self) -> tuple[Message, ...]:
        violation = _rpc().PreconditionFailure.Violation(
            type="MISMATCH", subject=self.field, description=self.description
        )
        return (_rpc().PreconditionFailure(violations=[violation]),)


class _WithReason(BatonError):
    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason: str = reason


class Unauthenticated(_WithReason):
    """Error: the API key is missing or unknown. `reason`: MISSING_API_KEY or INVALID_API_KEY; the message never
    contains the key.
    """

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(_WithReason):
    """Error: the API key does not allow the call. `reason`: one upper-case word, for example `NOT_ADMIN`."""

    code = grpc.StatusCode.PERMISSION_DENIED


class NotFound(BatonError):
    """Error: the requested resource is unknown here. `resource_type`: kind of resource, for example `model`."""

    code = grpc.StatusCode.NOT_FOUND

    def __init__(self, resource_type: str, name: str, message: str = "") -> None:
        super().__init__(message or f"{resource_type} {name!r} is not served here")
        self.resource_type = resource_type
        self.name = name

    @property
    def cause(self) -> str:
        return f"no_such_{self.resource_type}"

    @property
    def details(self) -> tuple[Message, ...]:
        return (_rpc().ResourceInfo(resource_type=self.resource_type, resource_name=self.name),)


class ResourceExhausted(BatonError):
    """Error: capacity is exhausted. `cause`: name of the exhausted limit, for counters."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_after_s: float, cause: str = "no_room") -> None:
        super().__init__(message)
        self.retry_after_s: float = retry_after_s
        self._cause = cause

    @property
    def cause(self) -> str:
        return self._cause


class RateLimited(ResourceExhausted):
    """Error: the caller has used up a limit of its API key. `limit`: name of a field of KeyLimits."""

    reason = "RATE_LIMITED"

    def __init__(self, message: str, limit: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s, limit)
        self.limit = limit
        self.metadata = {"limit": limit}


class Unavailable(BatonError):
    """Error: the service is not available. `reason`: one upper-case word, for example `WORKER_LOST`, `DRAINING`,
    `NOT_READY`.
    """

    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self, message: str, reason: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.reason: str = reason
        self.retry_after_s: float = retry_after_s


class Aborted(_WithReason):
    """Error: the stream was aborted. `reason`: one upper-case word, for example `SUPERSEDED`."""

    code = grpc.StatusCode.ABORTED


class DeadlineExceeded(BatonError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED

    def __init__(self, message: str = "the deadline passed") -> None:
        super().__init__(message)


class Internal(BatonError):
    """Internal error. `reason`: one upper-case word, for example `NONFINITE_LOGITS`; the message never has a
    traceback.
    """

    code = grpc.StatusCode.INTERNAL

    def __init__(self, reason: str, request_id: str, message: str = "internal error") -> None:
        super().__init__(message)
        self.reason = reason
        self.request_id = request_id

    @property
    def details(self) -> tuple[Message, ...]:
        return (*super().details, _rpc().RequestInfo(request_id=self.request_id))


async def abort_with(context: "grpc.aio.ServicerContext[Message, Message]", error: BatonError) -> NoReturn:
    """End the call with the error's status; the details are sent in `grpc-status-details-bin`.

    Raises: CancelledError if the connection closed before the status was sent.
    """
    try:
        from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
        from grpc_status import rpc_status

        details = error.details
    except ModuleNotFoundError:  # a machine with workers only, without the router's packages
        await _abort(context, error, ())
    packed = [AnyMessage() for _ in details]
    for box, detail in zip(packed, details, strict=True):
        box.Pack(detail)
    code_number: int = error.code.value[0]
    status = rpc_status.to_status(Status(code=code_number, message=error.message, details=packed))
    await _abort(context, error, status.trailing_metadata)


async def _abort(
    context: "grpc.aio.ServicerContext[Message, Message]",
    error: BatonError,
    metadata: "Sequence[tuple[str, str | bytes]]",
) -> NoReturn:
    try:
        await context.abort(error.code, error.message, metadata)
    except grpc.aio.InternalError as gone:  # the call was cancelled, which gRPC reports a moment later
        raise asyncio.CancelledError("the connection of the call was closed") from gone


def _rpc() -> Any:
    """Return the module of google.rpc's details, imported at first use."""
    return importlib.import_module("google.rpc.error_details_pb2")


def _error_info(reason: str, metadata: Mapping[str, str]) -> Message:
    info: Message = _rpc().ErrorInfo(reason=reason, domain=ERROR_DOMAIN, metadata=metadata)
    return info


def _retry_info(retry_after_s: float) -> Message:
    delay = Duration()
    delay.FromNanoseconds(round(retry_after_s * 1e9))
    info: Message = _rpc().RetryInfo(retry_delay=delay)
    return info


def release_frames(error: BaseException) -> None:
    """Drop the tracebacks of a handled exception and its causes, so that the objects in their frames are freed.

    A refused prompt may have megabytes. Frames and exceptions refer to each other, so without this the prompt would
    stay in memory until a full garbage collection.
    """
    cause: BaseException | None = error
    while cause is not None and cause.__traceback__ is not None:  # also ends if causes refer to each other
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
