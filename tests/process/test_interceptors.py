"""What the interceptor adds to a call, and that cancellation and streams pass through it unharmed."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from baton.process.errors import InvalidArgument, Unavailable
from baton.process.telemetry.trace_context import current_request_id, current_trace, new_trace

UNARY = "/baton.test.Test/Unary"
STREAM = "/baton.test.Test/Stream"


async def test_unknown_exception_is_internal_without_its_text(
    start_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(request: bytes, context: Any) -> bytes:
        raise ValueError("secret path")

    channel = await start_server(unary=fail)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(UNARY)(b"")
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value)
    assert "secret path" in caplog.text
    assert "baton.test.Test/Unary failed" in caplog.text


async def test_error_in_a_stream_follows_sent_messages(start_server: Any) -> None:
    async def generate(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"1"
        yield b"2"
        raise Unavailable("gone", "WORKER_LOST", retry_after_s=1)

    channel = await start_server(stream=generate)
    received = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for message in channel.unary_stream(STREAM)(b""):
            received.append(message)
    assert received == [b"1", b"2"]
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_stream_written_by_a_coroutine_works_too(start_server: Any) -> None:
    async def write(request: bytes, context: Any) -> None:
        await context.write(b"1")
        await context.write(b"2")

    channel = await start_server(stream=write)
    assert [message async for message in channel.unary_stream(STREAM)(b"")] == [b"1", b"2"]


async def test_abort_of_the_behaviour_itself_keeps_its_status(
    start_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def abort(request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, "here")
        return b""

    channel = await start_server(unary=abort)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(UNARY)(b"")
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.NOT_FOUND, "here")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_trace_and_request_id_come_from_the_metadata(start_server: Any) -> None:
    async def tell(request: bytes, context: Any) -> bytes:
        trace = current_trace.get()
        return f"{trace.traceparent if trace else None} {current_request_id.get()}".encode()

    trace = new_trace()
    channel = await start_server(unary=tell)
    metadata = (("traceparent", trace.traceparent), ("x-request-id", "r1"))
    assert await channel.unary_unary(UNARY)(b"", metadata=metadata) == f"{trace.traceparent} r1".encode()


async def test_stream_keeps_its_trace_from_message_to_message(start_server: Any) -> None:
    async def tell(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for _ in range(2):
            trace = current_trace.get()
            yield trace.trace_id.encode() if trace else b"lost"
            await asyncio.sleep(0)

    trace = new_trace()
    channel = await start_server(stream=tell)
    call = channel.unary_stream(STREAM)(b"", metadata=(("traceparent", trace.traceparent),))
    assert [message async for message in call] == [trace.trace_id.encode()] * 2


async def test_call_without_identifiers_has_none_until_it_gets_one(start_server: Any) -> None:
    async def tell(request: bytes, context: Any) -> bytes:
        return f"{current_trace.get()} {current_request_id.get()}".encode()

    channel = await start_server(unary=tell)
    assert await channel.unary_unary(UNARY)(b"") == b"None None"


@pytest.mark.parametrize("own", [None, "req-own"])
async def test_rejection_is_logged_under_its_request_id_or_a_new_one(
    start_server: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, own: str | None
) -> None:
    async def refuse(request: bytes, context: Any) -> bytes:
        if own is not None:
            current_request_id.set(own)
        raise InvalidArgument("text", "is empty")

    logged: list[str | None] = []

    def note(record: logging.LogRecord) -> bool:
        if record.name == "baton.process.serving.interceptors":
            logged.append(current_request_id.get())
        return True

    monkeypatch.setattr(caplog.handler, "filters", [note])
    caplog.set_level(logging.INFO, "baton.process.serving.interceptors")
    channel = await start_server(unary=refuse)
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary(UNARY)(b"")
    first, second = logged
    assert first is not None and first.startswith("req-")
    assert (first == second) == (own is not None)


async def test_cancellation_reaches_the_handler_and_is_no_error(
    start_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cancelled = asyncio.Event()

    async def generate(request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"1"
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    channel = await start_server(stream=generate)
    call = channel.unary_stream(STREAM)(b"")
    assert await call.read() == b"1"
    call.cancel()
    await asyncio.wait_for(cancelled.wait(), 20)
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.name.startswith("baton.process")]


async def test_unknown_method_is_unimplemented(start_server: Any) -> None:
    channel = await start_server()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/baton.test.Test/Nothing")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
