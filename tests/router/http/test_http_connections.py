"""Connections that do not do what connections do: silent ones, slow ones, endless ones."""

import asyncio
import errno
import json
import resource
import socket
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from baton.process.open_files import OWN_FILES
from baton.router.http.edge.exchange import Stalled, StreamedReply, send_reply
from baton.router.http.edge.slots import RESERVE, ConnectionSlots
from baton.router.trace.record import CallReader, Leave
from tests.router.conftest import encode
from tests.router.http.conftest import WAIT_S, Gateway

BODY = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n"


@pytest.mark.parametrize("settings", [{"http_head_s": 0.5}], indirect=True)
@pytest.mark.parametrize("sent", [b"POST", HEAD % 5], ids=["a word", "no end of headers"])
async def test_missing_head_ends_the_connection(gateway: Gateway, sent: bytes) -> None:
    assert (await gateway.raw(sent)).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("settings", [{"http_head_s": 0.1}], indirect=True)
async def test_silent_connection_is_closed_after_the_time_for_a_head(gateway: Gateway) -> None:
    assert await gateway.raw(b"") == b""


@pytest.mark.parametrize("settings", [{"http_body_s": 0.1}], indirect=True)
async def test_missing_body_ends_the_connection(gateway: Gateway) -> None:
    answer = await gateway.raw(HEAD % 500 + b"\r\n{")

    assert answer.startswith(b"HTTP/1.1 408 ") and b"did not arrive within 0.1 s" in answer


async def test_endless_headers_are_refused(gateway: Gateway) -> None:
    filler = b"x-filler: " + b"a" * 1000 + b"\r\n"

    assert (await gateway.raw(HEAD % 5, filler * 60, filler * 60)).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("settings", [{"http_max_connections": 1}], indirect=True)
async def test_request_without_room_is_refused_and_probes_are_answered(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    probe = b"GET %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    async with gateway.held("/v1/completions", prompt="a", max_tokens=1):
        refused = await gateway.raw(HEAD % len(BODY) + b"\r\n" + BODY)
        listed = await gateway.raw(probe % b"/v1/models")

        assert (await gateway.raw(probe % b"/health")).startswith(b"HTTP/1.1 200 ")
        assert b'"ready": true' in await gateway.raw(probe % b"/ready")
    for answer in (refused, listed):
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ") and b"\r\nretry-after: 1" in head
        assert json.loads(body)["error"]["code"] == "too_many_connections"
    metrics = (await gateway.client.get("/metrics")).text
    assert 'baton:http_connections_without_room_total{reason="refused"} 2.0' in metrics
    lines = [each.message for each in caplog.records if each.name.endswith(".slots")]
    assert lines == ["HTTP connections at the limit of 1 (--http-max-connections); since the last report: refused 1"]


@pytest.mark.parametrize("settings", [{"http_max_connections": 2}], indirect=True)
@pytest.mark.parametrize("sent", [b"", b"POST /", HEAD % 5, b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"])
async def test_connections_that_wait_for_a_request_give_way_to_new_ones(gateway: Gateway, sent: bytes) -> None:
    waiting = []
    for _ in range(2 + RESERVE + 1):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(sent)
        waiting.append((reader, writer))

    answer = await gateway.raw(HEAD % len(BODY) + b"connection: close\r\n\r\n" + BODY)

    assert answer.startswith(b"HTTP/1.1 200 ")
    async with asyncio.timeout(WAIT_S):
        assert (await waiting[0][0].read()).startswith(b"HTTP/1.1 200 " if sent.startswith(b"GET") else b"")
    assert gateway.process.dispatcher.active == 0
    for _, writer in waiting:
        writer.close()


async def test_accepting_pauses_without_descriptors(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, accept = [0], socket.socket.accept

    def full(listening: socket.socket) -> Any:
        calls[0] += 1
        if calls[0] <= 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", full)
    answer = await gateway.raw(HEAD % len(BODY) + b"connection: close\r\n\r\n" + BODY)

    assert answer.startswith(b"HTTP/1.1 200 ")
    metrics = (await gateway.client.get("/metrics")).text
    assert 'baton:http_connections_without_room_total{reason="no_descriptors"} 3.0' in metrics
    assert len([each for each in caplog.records if "no_descriptors" in each.message]) == 1


def test_connections_fit_the_limit_of_open_files(caplog: pytest.LogCaptureFixture) -> None:
    room = ConnectionSlots(2048)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        room.fit_open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert room.most == 256 - OWN_FILES - RESERVE
    [line] = [each.message for each in caplog.records]
    assert f"{room.most} HTTP connections" in line and "2048" in line and "ulimit -n" in line


@pytest.mark.parametrize("settings", [{"http_idle_s": 1}], indirect=True)
async def test_connection_is_kept_for_the_next_request_within_a_bound(gateway: Gateway) -> None:
    request = HEAD % len(BODY) + b"\r\n" + BODY

    answers = await gateway.raw(request, request)

    assert answers.count(b"HTTP/1.1 200 OK") == 2


async def test_malformed_http_is_rejected(gateway: Gateway) -> None:
    assert (await gateway.raw(b"\x16\x03\x01 hello\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("settings", [{"http_stall_s": 0.3}], indirect=True)
async def test_reader_that_takes_nothing_is_cut_off_and_its_request_cancelled(gateway: Gateway) -> None:
    gateway.pair.script = lambda prompt, choice: encode("x" * 900)
    # Cumulative, of 4 choices: more than any buffer on the way holds.
    body = json.dumps({"prompt": "a", "max_tokens": 900, "n": 4, "stream": True}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, ("127.0.0.1", gateway.port))
    await loop.sock_sendall(
        connection, b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body
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


async def test_reader_of_an_unread_stream_has_stalled() -> None:
    reader, sent, why = CallReader(), list[Any](), list[Leave]()

    async def chunks() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"chunk"
        finally:
            why.append(reader.leaves)  # as the request is told when it is closed

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 3:
            raise Stalled

    with pytest.raises(Stalled):
        await send_reply(StreamedReply(chunks()), send, {}, reader=reader)
    assert (len(sent), why) == (3, [Leave.STALLED])
