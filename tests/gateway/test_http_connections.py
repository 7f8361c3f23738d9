"""Connections that do not do what connections do: silent ones, slow ones, endless ones."""

import asyncio
import json
import socket

import pytest

from tests.gateway.conftest import WAIT_S, Gateway
from tests.router.conftest import encode

BODY = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n"


async def told(gateway: Gateway, *sent: bytes) -> bytes:
    """Everything that the server says until it ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    try:
        for part in sent:
            writer.write(part)
            await writer.drain()
        async with asyncio.timeout(WAIT_S):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("settings", [{"http_head_s": 0.1}], indirect=True)
@pytest.mark.parametrize("sent", [b"", b"POST", HEAD % 5], ids=["silence", "a word", "no end of headers"])
async def test_a_head_that_does_not_come_ends_the_connection(gateway: Gateway, sent: bytes) -> None:
    assert (await told(gateway, sent)).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("settings", [{"http_body_s": 0.1}], indirect=True)
async def test_a_body_that_does_not_come_in_ends_the_connection(gateway: Gateway) -> None:
    answer = await told(gateway, HEAD % 500 + b"\r\n{")

    assert answer.startswith(b"HTTP/1.1 408 ") and b"did not arrive within 0.1 s" in answer


async def test_endless_headers_are_refused(gateway: Gateway) -> None:
    filler = b"x-filler: " + b"a" * 1000 + b"\r\n"

    assert (await told(gateway, HEAD % 5, filler * 60, filler * 60)).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("settings", [{"http_max_connections": 2}], indirect=True)
async def test_connections_have_a_most(gateway: Gateway) -> None:
    _, idle = await asyncio.open_connection("127.0.0.1", gateway.port)  # beside the client's own

    assert (await told(gateway)).startswith(b"HTTP/1.1 503 ")
    idle.close()
    await idle.wait_closed()


@pytest.mark.parametrize("settings", [{"http_idle_s": 1}], indirect=True)
async def test_a_connection_is_kept_for_the_next_request_and_not_for_ever(gateway: Gateway) -> None:
    request = HEAD % len(BODY) + b"\r\n" + BODY

    answers = await told(gateway, request, request)

    assert answers.count(b"HTTP/1.1 200 OK") == 2


async def test_what_is_no_http_is_refused(gateway: Gateway) -> None:
    assert (await told(gateway, b"\x16\x03\x01 hello\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("settings", [{"http_stall_s": 0.3}], indirect=True)
async def test_a_reader_that_takes_nothing_is_cut_off_and_its_request_cancelled(gateway: Gateway) -> None:
    gateway.pair.script = lambda prompt, choice: encode("x" * 900)
    # Cumulative, of 4 choices: more than any buffer on the way holds.
    body = json.dumps({"prompt": "a", "max_tokens": 900, "n": 4, "stream": True}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, ("127.0.0.1", gateway.port))
    await loop.sock_sendall(
        connection, b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )
    await gateway.pair.decode.received("start")

    neighbour = await gateway.post("/v1/completions", prompt="a", max_tokens=3)

    assert neighbour["choices"][0]["finish_reason"] == "length"
    started = await gateway.pair.decode.received("start")
    cancelled = await gateway.pair.decode.received("cancel")
    assert cancelled.attempt_id == started.attempt_id
    assert gateway.process.dispatcher.active == 0
    with connection, pytest.raises(ConnectionResetError):
        async with asyncio.timeout(WAIT_S):
            while await loop.sock_recv(connection, 1 << 20):
                pass
            raise ConnectionResetError  # an end is as good as a reset
