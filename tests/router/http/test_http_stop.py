"""Answers that are under way when a router's time to drain is over."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.fixtures.waiting import eventually
from tests.router.http.conftest import WAIT_S, Gateway
from tests.router.tokenizers_for_tests import byte_level

MESSAGES = {"messages": [{"role": "user", "content": "a"}]}
STREAMS = {
    "/v1/completions": {"prompt": "a", "stream": True},
    "/v1/chat/completions": {**MESSAGES, "stream": True},
    "/v1/responses": {"input": "a", "stream": True, "store": False},
    "/v1/messages": {**MESSAGES, "model": "tiny", "max_tokens": 9, "stream": True},
    "/api/chat": {**MESSAGES, "model": "tiny"},
    "/api/generate": {"prompt": "a", "model": "tiny"},
    "/generate": {"prompt": "a", "stream": True},
}
MESSAGE = "the router stopped before the answer was complete; retry"


@asynccontextmanager
async def begun(gateway: Gateway, path: str, first_token: bool) -> AsyncIterator[asyncio.StreamReader]:
    """A call whose request is with the workers."""
    gateway.pair.manual = True
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    body = json.dumps(STREAMS[path]).encode()
    writer.write(
        b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(body)) + body
    )
    attempt_id = (await gateway.pair.prefill.received("prefill")).attempt_id
    if first_token:
        gateway.pair.first_step(attempt_id, byte_level().encode("H").ids)
        gateway.pair.landed(attempt_id)
        async with asyncio.timeout(WAIT_S):
            await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b"H")
    yield reader
    writer.close()


def chunks(rest: bytes) -> bytes:
    """What is left of a chunked body, checked to be whole, joined; the first chunk is one of which a part was read."""
    first, rest = rest.split(b"\r\n", 1)
    content = first + b"\n"
    while True:
        size, rest = rest.split(b"\r\n", 1)
        count = int(size, 16)
        content, end, rest = content + rest[:count], rest[count : count + 2], rest[count + 2 :]
        assert end == b"\r\n"
        if count == 0:
            assert rest == b""
            return content


@pytest.mark.parametrize("path", STREAMS)
async def test_stream_ends_with_an_error_and_whole_chunks_when_the_drain_is_over(
    gateway: Gateway, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with begun(gateway, path, first_token=True) as reader, asyncio.timeout(WAIT_S):
        gateway.process.running.stop()

        content = chunks(await reader.read()).decode()
    events = [each for each in content.replace("\0", "\n\n").split("\n") if MESSAGE in each]
    assert len(events) == 1
    error = json.loads(events[0].removeprefix("data: "))
    match path:
        case "/v1/messages":
            assert (error["type"], error["error"]["type"]) == ("error", "overloaded_error")
            assert "event: error\n" in content
        case "/v1/responses":
            assert error["type"] == "response.failed" and error["response"]["status"] == "failed"
        case "/api/chat" | "/api/generate":
            assert error == {"error": MESSAGE}
        case _:
            assert (error["error"]["code"], error["error"]["type"]) == ("router_stopped", "service_unavailable_error")
    if path in ("/v1/completions", "/v1/chat/completions"):
        assert content.endswith("data: [DONE]\n\n")
    await gateway.pair.decode.received("cancel")
    assert [each for each in caplog.records if each.exc_info] == []


async def test_unstarted_answer_is_rejected_after_the_drain(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    async with begun(gateway, "/v1/completions", first_token=False) as reader, asyncio.timeout(WAIT_S):
        gateway.process.running.stop()

        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ") and b"\r\nretry-after: 1" in head
    assert json.loads(body)["error"]["code"] == "router_stopped"
    assert [each for each in caplog.records if each.exc_info] == []


@pytest.mark.parametrize("settings", [{"http_stall_s": 30.0}], indirect=True)
async def test_reader_that_takes_nothing_is_cut_off_without_a_traceback_at_the_end(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.says("x" * 900)
    body = json.dumps({"prompt": "a", "max_tokens": 900, "n": 4, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await gateway.pair.decode.received("start")

    gateway.process.running.stop()

    await eventually(lambda: not gateway.process.dispatcher.active)
    assert [each for each in caplog.records if each.exc_info] == []
    writer.transport.abort()
    del reader
