"""Where a request begins and ends: upgrades, chunks, trailers, heads that two servers could read in two ways."""

import asyncio
import json
import re
from itertools import product

import pytest

from tests.router.http.conftest import WAIT_S, Gateway

BODY = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
LIST = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
LAST = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


def statuses(answered: bytes) -> list[bytes]:
    return re.findall(rb"HTTP/1\.1 (\d+) ", answered)


def chunk(content: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(content), extension, content)


UPGRADES = [
    *(b"connection: %b\r\nupgrade: h2c\r\n" % each for each in (b"Upgrade", b"keep-alive, Upgrade", b"x,UPGRADE")),
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n",
    b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-key: a\r\n",
    b"upgrade: TLS/1.0, IRC/6.9\r\nupgrade: h2c\r\nconnection: keep-alive\r\nconnection: upgrade\r\n",
]


def in_segments(message: bytes, segments: str) -> list[bytes]:
    cut = message.index(b"\r\n\r\n") + 4
    if segments == "two":
        return [message[:cut], message[cut:]]
    return [message] if segments == "one" else [message[at : at + 90] for at in range(0, len(message), 90)]


async def test_unsupported_upgrade_is_ignored(gateway: Gateway) -> None:
    bodies = (
        b"content-length: %d\r\n\r\n" % len(BODY) + BODY,
        b"transfer-encoding: chunked\r\n\r\n" + chunk(BODY[:5]) + chunk(BODY[5:]) + b"0\r\n\r\n",
    )
    for upgrade, body, segments in product(UPGRADES, bodies, ("one", "two", "many")):
        answered = await gateway.raw(*in_segments(HEAD + upgrade + body + LAST, segments))

        assert statuses(answered) == [b"200", b"200"], (upgrade, body, segments)
        assert b'"text_completion"' in answered and b'"oldest_protocol"' in answered


async def test_body_behind_an_upgrade_is_not_executed_as_a_request(gateway: Gateway) -> None:
    head = HEAD + b"connection: Upgrade\r\nupgrade: h2c\r\ncontent-length: %d\r\n\r\n" % len(LIST)

    answered = await gateway.raw(head, LIST + LAST)

    assert statuses(answered) == [b"400", b"200"]
    assert b"not JSON" in answered and b'"data"' not in answered


async def test_upgrades_without_a_body_are_requests_of_their_own(gateway: Gateway) -> None:
    asked = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"

    answered = await gateway.raw(asked * 3 + LAST)

    assert statuses(answered) == [b"200"] * 4
    assert answered.count(b'"object": "list"') == 3


AMBIGUOUS = [
    (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n", b"0\r\n\r\n"),
    (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n", b"0\r\n\r\n"),
    (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ncontent-length: 3\r\n", b"abc"),
    (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ncontent-length: 4\r\n", b"abcd"),
    (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3, 3\r\n", b"abc"),
    (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: +3\r\n", b"abc"),
    (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, identity\r\n", b"0\r\n\r\n"),
    (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: identity\r\n", b""),
    (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n", b"0\r\n\r\n"),
    (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: xchunked\r\n", b"0\r\n\r\n"),
    (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding : chunked\r\n", b"0\r\n\r\n"),
    (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n", b"0\r\n\r\n"),
    (b"POST / HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n", b"0\r\n\r\n"),
    (b"GET / HTTP/1.1\r\nhost: a\r\nx: b\r\n c\r\n", b""),
    (b"GET / HTTP/1.1\r\nhost: a\r\nx: b\n", b""),
    (b"GET / HTTP/1.1\r\nhost: a\r\nx: b\0c\r\n", b""),
    (b"GET / HTTP/1.1\r\n", b""),
    (b"GET / HTTP/1.1\r\nhost: a\r\nhost: a\r\n", b""),
    (b"GET / HTTP/1.1\r\nhost: a, b\r\n", b""),
    (b"GET / HTTP/1.1\r\nhost: a/b\r\n", b""),
    (b"GET / HTTP/1.0\r\nhost: a\r\nhost: b\r\n", b""),
    (b"GET / HTTP/2.0\r\nhost: a\r\n", b""),
    (b"GET / HTTP/0.9\r\nhost: a\r\n", b""),
    (b"PRI * HTTP/2.0\r\n", b"SM\r\n\r\n"),
    (b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\n", b""),
    (b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\nconnection: upgrade\r\nupgrade: h2c\r\n", b""),
]


async def test_ambiguous_head_is_refused_and_ends_the_connection(gateway: Gateway) -> None:
    for head, rest in AMBIGUOUS:
        answered = await gateway.raw(head + b"\r\n" + rest + LIST)

        assert statuses(answered) == [b"400"], head
        assert json.loads(answered.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


async def test_malformed_chunk_is_refused_and_ends_the_connection(gateway: Gateway) -> None:
    for size in (b"-1", b"0x1", b"1 ", b"g", b"1\n", b"fffffffffffffffff", b""):
        rest = b"\r\na\r\n0\r\n\r\n" + LIST
        assert statuses(await gateway.raw(CHUNKED + size + rest)) == [b"400"], size


async def test_trailers_are_not_headers(gateway: Gateway) -> None:
    trailer = b"host: other\r\nx-request-id: from-a-trailer\r\n"

    answered = await gateway.raw(CHUNKED + chunk(BODY, b";a=b") + b"0\r\n" + trailer + b"\r\n" + LAST)

    assert statuses(answered) == [b"200", b"200"]
    assert b"from-a-trailer" not in answered


ENDLESS = {
    "one trailer": (chunk(b"{") + b"0\r\nx: ", b"a"),
    "trailers": (chunk(b"{") + b"0\r\n", b"x: " + b"a" * 4000 + b"\r\n"),
    "tiny trailers": (chunk(b"{") + b"0\r\n", b"x:\r\n"),
    "one extension": (b"1;", b"a"),
    "extensions": (b"", chunk(b" ", b";a=" + b"b" * 1000)),
    "short extensions": (b"", chunk(b" ", b";abcdef")),
    "one-byte chunks": (b"", chunk(b" ")),
}


@pytest.mark.parametrize(("first", "more"), ENDLESS.values(), ids=list(ENDLESS))
async def test_bytes_outside_the_body_are_limited(gateway: Gateway, first: bytes, more: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(CHUNKED + first)
    block, sent = more * ((16 << 10) // len(more)), 0
    refused = asyncio.create_task(reader.read(400))
    async with asyncio.timeout(WAIT_S):
        while not refused.done():
            writer.write(block)
            sent += len(block)
            await writer.drain()
            await asyncio.sleep(0)

    assert (await refused).startswith(b"HTTP/1.1 431 ")
    assert gateway.process.dispatcher.active == 0
    with pytest.raises(ConnectionError):
        async with asyncio.timeout(WAIT_S):
            while True:
                writer.write(block)
                await writer.drain()


async def test_bodies_in_short_chunks_are_read(gateway: Gateway) -> None:
    body = json.dumps({"prompt": [1] * 900, "max_tokens": 1}).encode()
    request = CHUNKED + b"".join(chunk(body[at : at + 2]) for at in range(0, len(body), 2)) + b"0\r\n\r\n"

    assert statuses(await gateway.raw(request + LAST)) == [b"200", b"200"]


async def test_empty_lines_between_requests_have_a_most(gateway: Gateway) -> None:
    assert statuses(await gateway.raw(LIST, b"\r\n" * (40 << 10))) == [b"200", b"431"]


@pytest.mark.parametrize("settings", [{"http_idle_s": 0.5}], indirect=True)
async def test_empty_lines_between_requests_do_not_keep_a_connection(gateway: Gateway) -> None:
    assert statuses(await gateway.raw(LIST, b"\r\n")) == [b"200"]


@pytest.mark.parametrize("settings", [{"http_head_s": 0.5}], indirect=True)
async def test_unread_body_does_not_keep_a_connection(gateway: Gateway) -> None:
    head = b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n"

    assert statuses(await gateway.raw(head, b"a")) == [b"404", b"408"]


async def test_head_of_many_fields_is_refused(gateway: Gateway) -> None:
    fields = b"".join(b"x%d:\r\n" % number for number in range(300))

    assert statuses(await gateway.raw(HEAD + fields + b"\r\n")) == [b"431"]


async def test_pipelined_requests_are_answered_in_order_however_many(gateway: Gateway) -> None:
    answered = await gateway.raw(LIST * 700 + LAST)

    assert statuses(answered) == [b"200"] * 701
    assert answered.endswith(b"}") and b'"oldest_protocol"' in answered[-300:]


async def test_pipelined_requests_wait_as_bytes(gateway: Gateway) -> None:
    """Else a client could fill the memory behind an answer that takes long."""
    request = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    gateway.pair.manual = True
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(request)
    await gateway.pair.prefill.received("prefill")
    sent = 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            while sent < 64 << 20:
                writer.write(LIST * 1000)
                await writer.drain()
                sent += len(LIST) * 1000
    assert sent < 16 << 20  # as much as the kernel keeps
    writer.transport.abort()


async def test_leaving_client_ends_its_earlier_pipelined_request(gateway: Gateway) -> None:
    request = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    gateway.pair.manual = True
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(request + LIST)
    await gateway.pair.prefill.received("prefill")

    writer.transport.abort()

    await gateway.pair.prefill.received("cancel")


@pytest.mark.parametrize("streams", [False, True])
async def test_answer_of_http_1_0_has_no_chunks_and_ends_with_the_connection(gateway: Gateway, streams: bool) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 3, "stream": streams}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nconnection: keep-alive\r\nexpect: 100-continue\r\n"

    answered = await gateway.raw(head + b"content-length: %d\r\n\r\n" % len(body) + body)

    fields, _, content = answered.partition(b"\r\n\r\n")
    assert statuses(answered) == [b"200"]
    assert b"transfer-encoding" not in fields and b"connection: close" in fields
    if streams:
        assert content.startswith(b"data: {") and content.endswith(b"\n\ndata: [DONE]\n\n")
    else:
        assert json.loads(content)["object"] == "text_completion"


async def test_body_of_a_patient_client_is_asked_for(gateway: Gateway) -> None:
    head = HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY)

    assert statuses(await gateway.raw(head, BODY + LAST)) == [b"100", b"200", b"200"]


async def test_forms_of_a_target_are_served(gateway: Gateway) -> None:
    for target in (b"http://localhost/version", b"/version?"):
        request = b"GET %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n" % target

        assert statuses(await gateway.raw(request + LIST)) == [b"200"]
