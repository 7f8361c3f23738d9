"""The errors that a caller sees. Every failure of a call is one of these.

BatonClientError
├── InvalidRequest      the request can never succeed as it is; names the field
├── ModelNotFound       the model is not served there
├── NotAllowed          no API key, one that is not known, or one that does not allow this
├── Busy                no room at the moment; with the time to come back
├── Unavailable         no server, no workers, or the one that answered is gone
├── DeadlineExceeded    timeout_s, or the server's own limit, passed
├── Cancelled           the server, or closing the client, ended the call
└── ServerError         a fault of the server
    └── ProtocolError   the server broke its promise: a gap in the answer, or an end without Finished
"""

import dataclasses
from collections.abc import Mapping

import grpc


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorDetails:
    """Details beyond code and message; None where the server sent none."""

    field: str | None = None  # path of the offending field
    resource: str | None = None  # name of the missing resource
    retry_after_s: float | None = None
    reason: str | None = None  # a short constant, for example "PROMPT_TOO_LONG"
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of the reason, for example the limit
    request_id: str | None = None


NO_DETAILS = ErrorDetails()


class BatonClientError(Exception):
    """`code` is the status of the call, or the one that fits best where the call never left the client."""

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
        """Path of the wrong field, for example "sampling.temperature"."""
        return self.details.field


class ModelNotFound(BatonClientError):
    code = grpc.StatusCode.NOT_FOUND

    @property
    def name(self) -> str | None:
        return self.details.resource


class NotAllowed(BatonClientError):
    """`reason` is MISSING_API_KEY, INVALID_API_KEY or NOT_ADMIN."""

    code = grpc.StatusCode.UNAUTHENTICATED


class _ComeBack(BatonClientError):
    @property
    def retry_after_s(self) -> float | None:
        """How long the server asks to wait."""
        return self.details.retry_after_s


class Busy(_ComeBack):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(_ComeBack):
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
        """The id to look for in the server's logs."""
        return self.details.request_id


class ProtocolError(ServerError):
    def __init__(self, message: str) -> None:
        super().__init__(message, code=grpc.StatusCode.DATA_LOSS)
