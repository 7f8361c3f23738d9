"""Every error arrives at a client as its status with its details."""

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from baton.process.errors import (
    BatonError,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
    abort_with,
)

METHOD = "/baton.test.Test/Unary"


async def _raise_over_grpc(start_server: Any, error: BatonError) -> tuple[grpc.aio.AioRpcError, list[Any]]:
    async def fail(request: bytes, context: Any) -> bytes:
        raise error

    channel = await start_server(unary=fail)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(METHOD)(b"")
    status: Any = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
    return caught.value, [] if status is None else list(status.details)


def _unpack(box: Any, kind: Any) -> Any:
    message = kind()
    assert box.Unpack(message), f"{box.type_url} is not {kind.__name__}"
    return message


async def test_invalid_argument_names_the_field_and_the_reason(start_server: Any) -> None:
    error = InvalidArgument("sampling.top_p", "must lie in (0, 1]", "PROMPT_TOO_LONG", {"limit": "4", "got": "5"})
    call, details = await _raise_over_grpc(start_server, error)
    assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert call.details() == "sampling.top_p: must lie in (0, 1]"
    (violation,) = _unpack(details[0], error_details_pb2.BadRequest).field_violations
    assert (violation.field, violation.description) == ("sampling.top_p", "must lie in (0, 1]")
    info = _unpack(details[1], error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain, dict(info.metadata)) == ("PROMPT_TOO_LONG", "baton", {"limit": "4", "got": "5"})


async def test_failed_precondition_names_the_mismatch(start_server: Any) -> None:
    call, details = await _raise_over_grpc(start_server, FailedPrecondition("reader.fingerprint", "another model"))
    assert call.code() is grpc.StatusCode.FAILED_PRECONDITION
    (violation,) = _unpack(details[0], error_details_pb2.PreconditionFailure).violations
    assert (violation.subject, violation.description) == ("reader.fingerprint", "another model")


async def test_not_found_names_the_resource(start_server: Any) -> None:
    call, details = await _raise_over_grpc(start_server, NotFound("model", "gpt"))
    assert call.code() is grpc.StatusCode.NOT_FOUND
    resource = _unpack(details[0], error_details_pb2.ResourceInfo)
    assert (resource.resource_type, resource.resource_name) == ("model", "gpt")


async def test_resource_exhausted_says_when_to_retry(start_server: Any) -> None:
    call, details = await _raise_over_grpc(start_server, ResourceExhausted("queue full", retry_after_s=1.25))
    assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert _unpack(details[0], error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 1250


async def test_unavailable_says_why_and_when_to_retry(start_server: Any) -> None:
    call, details = await _raise_over_grpc(start_server, Unavailable("gone", "WORKER_LOST", retry_after_s=0.5))
    assert call.code() is grpc.StatusCode.UNAVAILABLE
    assert _unpack(details[0], error_details_pb2.ErrorInfo).reason == "WORKER_LOST"
    assert _unpack(details[1], error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 500


async def test_deadline_exceeded_has_no_details(start_server: Any) -> None:
    call, details = await _raise_over_grpc(start_server, DeadlineExceeded())
    assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert details == []


async def test_internal_names_reason_and_request(start_server: Any) -> None:
    call, details = await _raise_over_grpc(start_server, Internal("NONFINITE_LOGITS", "r1"))
    assert call.code() is grpc.StatusCode.INTERNAL
    assert _unpack(details[0], error_details_pb2.ErrorInfo).reason == "NONFINITE_LOGITS"
    assert _unpack(details[1], error_details_pb2.RequestInfo).request_id == "r1"


async def test_status_that_the_connection_cannot_carry_becomes_cancelled() -> None:
    class Gone:
        async def abort(self, *status: object) -> None:
            raise grpc.aio.InternalError("Failed execute_batch")

    context: Any = Gone()
    with pytest.raises(asyncio.CancelledError):
        await abort_with(context, Unavailable("the worker is lost", "WORKER_LOST", retry_after_s=1))
