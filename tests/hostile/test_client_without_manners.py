"""Malicious HTTP clients: floods, request smuggling, and idle or slow connections."""

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from tests.fixtures.attacked_router import WAIT_S, AttackedRouter

HOST = b"host: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
LIST = b"GET /v1/models HTTP/1.1\r\n" + HOST + b"\r\n"
MAX_GROWTH_BYTES = 64 << 20
MAX_SENT_BYTES = 64 << 20  # by one connection
BLOCK_BYTES = 64 << 10
SHARES = 3  # divisor of --hostile-seconds, since this file has many tests


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedRouter]:
    started = AttackedRouter(tmp_path_factory.mktemp("router"))
    for _ in range(3):  # warm-up: what is allocated only once
        with started.neighbour():
            assert started.ask("/v1/models") == 200
    yield started
    assert started.close() == 0
    assert "Traceback" not in started.log


def connected(router: AttackedRouter) -> socket.socket:
    return socket.create_connection(("127.0.0.1", router.port), timeout=WAIT_S)


def everything(connection: socket.socket) -> bytes:
    answered = b""
    while more := connection.recv(BLOCK_BYTES):
        answered += more
    return answered


def flood(router: AttackedRouter, until_s: float, first: bytes, more: bytes) -> None:
    """Open connections one after another; send `first`, then `more` until the router closes the connection."""
    block = more * (BLOCK_BYTES // len(more))
    while time.monotonic() < until_s:
        with connected(router) as connection:
            connection.settimeout(0.2)  # the router may stop reading without closing
            try:
                connection.sendall(first)
                for _ in range(MAX_SENT_BYTES // len(block)):
                    connection.sendall(block)
                    if time.monotonic() > until_s:
                        break
            except (ConnectionError, TimeoutError):
                continue


FLOODS = {
    "one trailer": (CHUNKED + b"1\r\n{\r\n0\r\nx: ", b"a"),
    "trailers": (CHUNKED + b"1\r\n{\r\n0\r\n", b"x: " + b"a" * 4000 + b"\r\n"),
    "tiny trailers": (CHUNKED + b"1\r\n{\r\n0\r\n", b"x:\r\n"),
    "one chunk extension": (CHUNKED + b"1;", b"a"),
    "chunk extensions": (CHUNKED, b"1;a=" + b"b" * 1000 + b"\r\n \r\n"),
    "one-byte chunks": (CHUNKED, b"1\r\n \r\n"),
    "two-byte chunks": (CHUNKED, b"2\r\n  \r\n"),
    "one header": (POST + b"x: ", b"a"),
    "headers": (POST, b"x: " + b"a" * 1000 + b"\r\n"),
    "tiny headers": (POST, b"x:\r\n"),
    "request line": (b"GET /", b"a"),
    "empty lines": (LIST, b"\r\n"),
    "pipelined requests": (b"", LIST),
    "pipelined upgrades": (b"", b"GET /health HTTP/1.1\r\n" + HOST + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n"),
    "a body after its answer": (b"POST /no HTTP/1.1\r\n" + HOST + b"content-length: 9999999999\r\n\r\n", b"a"),
}


def smuggle(router: AttackedRouter, until_s: float) -> None:
    head = POST + b"connection: Upgrade\r\nupgrade: h2c\r\n"
    length = head + b"content-length: %d\r\n\r\n" % len(LIST) + LIST
    chunked = head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(LIST), LIST)
    while time.monotonic() < until_s:
        for request in (length, chunked):
            with connected(router) as connection:
                cut = request.index(b"\r\n\r\n") + 4
                connection.sendall(request[:cut])
                connection.sendall(request[cut:] + b"GET /no HTTP/1.1\r\n" + HOST + b"connection: close\r\n\r\n")
                answered = everything(connection)
            assert answered.count(b"HTTP/1.1 ") == 2 and b"HTTP/1.1 404 " in answered
            assert b'"object": "list"' not in answered


def crowd(router: AttackedRouter, until_s: float, first: bytes, byte: bytes) -> None:
    """Hold 300 connections, more than the router may have open, each of which sends a byte now and then."""
    held: list[socket.socket] = []
    try:
        while time.monotonic() < until_s or len(held) < 300:
            if len(held) < 300:
                held.append(connected(router))
                held[-1].sendall(first)
                continue
            assert router.ask("/health") == 200
            for at, connection in enumerate(held):
                try:
                    connection.sendall(byte)
                except ConnectionError:
                    connection.close()
                    held[at] = connected(router)
        assert router.ask("/ready") == 200
    finally:
        for connection in held:
            connection.close()


CROWDS = {
    "silence": (b"", b""),
    "slow heads": (b"POST /v1/completions HTT", b"P"),
    "slow headers": (POST + b"x: ", b"a"),
    "slow bodies": (POST + b"content-length: 100000\r\n\r\n", b" "),
    "idle after an answer": (LIST, b""),
    "half a handshake": (b"\x16\x03\x01", b""),
}


def neighbour_reads_on(router: AttackedRouter, seconds: float, attack: Callable[[float], None]) -> None:
    with router.neighbour():
        router.forget_peak()
        before = router.peak_bytes
        attack(time.monotonic() + seconds)
        assert router.ask("/health") == 200
        grown = router.peak_bytes - before
    assert router.is_alive
    assert grown < MAX_GROWTH_BYTES, f"{grown >> 20} MiB"


@pytest.mark.parametrize("kind", FLOODS)
def test_neighbour_is_served_during_a_flood(router: AttackedRouter, hostile_s: float, kind: str) -> None:
    neighbour_reads_on(router, hostile_s / SHARES, lambda until_s: flood(router, until_s, *FLOODS[kind]))


def test_neighbour_is_served_during_smuggled_requests(router: AttackedRouter, hostile_s: float) -> None:
    neighbour_reads_on(router, hostile_s / SHARES, lambda until_s: smuggle(router, until_s))


@pytest.mark.parametrize("kind", CROWDS)
def test_neighbour_is_served_during_a_crowd(router: AttackedRouter, hostile_s: float, kind: str) -> None:
    neighbour_reads_on(router, hostile_s / SHARES, lambda until_s: crowd(router, until_s, *CROWDS[kind]))
