from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from baton.client.errors import (
    DETAILS_KEY,
    BatonClientError,
    Busy,
    Cancelled,
    DeadlineExceeded,
    ErrorDetails,
    InvalidRequest,
    ModelNotFound,
    ServerError,
    Unavailable,
    error_from_status,
)


def trailing(*details: Any) -> list[tuple[str, str | bytes]]:
    status = status_pb2.Status()
    for detail in details:
        status.details.add().Pack(detail)
    return [("date", "today"), (DETAILS_KEY, status.SerializeToString())]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.OUT_OF_RANGE, InvalidRequest),
        (grpc.StatusCode.NOT_FOUND, ModelNotFound),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Busy),
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, Cancelled),
        (grpc.StatusCode.INTERNAL, ServerError),
        (grpc.StatusCode.UNKNOWN, ServerError),
        (grpc.StatusCode.UNIMPLEMENTED, ServerError),
    ],
)
def test_each_status_has_its_error(code: grpc.StatusCode, kind: type[BatonClientError]) -> None:
    error = error_from_status(code, "what happened", [])
    assert type(error) is kind
    assert str(error) == "what happened"
    assert error.details == ErrorDetails()
    if code is not grpc.StatusCode.OUT_OF_RANGE:
        assert error.code is code


def test_call_that_a_stopping_server_lets_go_can_be_made_elsewhere() -> None:
    error = error_from_status(grpc.StatusCode.CANCELLED, "CANCELLED", [])
    assert isinstance(error, Unavailable)
    assert error.retry_after_s is None


def test_invalid_request_names_field_and_reason() -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field="text", description="too long")
    info = error_details_pb2.ErrorInfo(reason="PROMPT_TOO_LONG", metadata={"limit": "64", "got": "65"})
    details = trailing(error_details_pb2.BadRequest(field_violations=[violation]), info)
    error = error_from_status(grpc.StatusCode.INVALID_ARGUMENT, "text: too long", details)
    assert isinstance(error, InvalidRequest)
    assert (error.field, error.reason) == ("text", "PROMPT_TOO_LONG")
    assert error.details.metadata == {"limit": "64", "got": "65"}


def test_missing_model_is_named() -> None:
    details = trailing(error_details_pb2.ResourceInfo(resource_type="model", resource_name="big"))
    error = error_from_status(grpc.StatusCode.NOT_FOUND, "no", details)
    assert isinstance(error, ModelNotFound)
    assert error.name == "big"


def test_busy_has_retry_after() -> None:
    details = trailing(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=1, nanos=250_000_000)))
    error = error_from_status(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", details)
    assert isinstance(error, Busy)
    assert error.retry_after_s == 1.25


def test_server_error_carries_its_request_id() -> None:
    info = error_details_pb2.ErrorInfo(reason="NONFINITE_LOGITS")
    details = trailing(info, error_details_pb2.RequestInfo(request_id="r-7"))
    error = error_from_status(grpc.StatusCode.INTERNAL, "bug", details)
    assert isinstance(error, ServerError)
    assert (error.request_id, error.reason) == ("r-7", "NONFINITE_LOGITS")


@pytest.mark.parametrize("broken", [b"\xff\xff", b"", b"\x1a\x02\xff\xff"])
def test_details_that_do_not_parse_leave_the_code_standing(broken: bytes) -> None:
    error = error_from_status(grpc.StatusCode.INVALID_ARGUMENT, None, [(DETAILS_KEY, broken)])
    assert isinstance(error, InvalidRequest)
    assert str(error) == "INVALID_ARGUMENT"
    assert error.field is None


def test_broken_detail_leaves_the_others_standing() -> None:
    status = status_pb2.Status()
    status.details.add(type_url="type.googleapis.com/google.rpc.BadRequest", value=b"\xff\xff")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="PROMPT_TOO_LONG"))
    status.details.add(type_url="type.googleapis.com/someone.elses.Detail", value=b"\xff\xff")
    error = error_from_status(grpc.StatusCode.INVALID_ARGUMENT, "no", [(DETAILS_KEY, status.SerializeToString())])
    assert error.reason == "PROMPT_TOO_LONG"
