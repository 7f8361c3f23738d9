"""Ids and names that clients give are printable ASCII: others are refused by field, and logged nowhere as they are."""

from typing import Any

import grpc
import pytest

from baton.protos import baton_pb2
from tests.router.conftest import READY_S, Stack

ODD = "a\n\x1b[31mb"


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("request_id", ODD, "printable ASCII"),
        ("request_id", "r" * 129, "at most 128"),
        ("session_id", ODD, "printable ASCII"),
        ("model", ODD, "printable ASCII"),
        ("model", "m" * 129, "at most 128"),
    ],
)
async def test_identifier_with_control_characters_is_refused_by_field(
    stack: Stack, field: str, value: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    await stack.ready()
    request: Any = baton_pb2.GenerateRequest(text="hello", **{field: value})  # type: ignore[arg-type]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stack.stub.Generate(request, timeout=READY_S).read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(refused.value.details()).startswith(f"{field}: {why}")
    assert not any("\x1b" in each.getMessage() for each in caplog.records)
